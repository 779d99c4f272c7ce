"""The source's side of handoffs: pins blocks, publishes what is computed, ends on commit, release or expiry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from kv_transfer.journey import Clock, JourneyKey, SourceInfo
from kv_transfer.manifest import Closing
from kv_transfer.transport import SourceTransport
from pd_engine.cache.arena import Arena
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import PdRelayError
from pd_engine.settings import TransferSettings

Checksums = Callable[[list[memoryview]], npt.NDArray[np.uint64]]
"""One checksum a piece; `Ops.block_checksums`."""


class SourceEnd(Enum):
    """Why a handoff's pins ended."""

    COMMITTED = "committed"    # the destination has everything
    RELEASED = "released"      # the router ended it, or the first token ended the request
    FAILED = "failed"          # `fail` was called
    EXPIRED = "expired"        # nobody renewed it
    SUPERSEDED = "superseded"  # a higher attempt of the journey has begun


OnEnd = Callable[[JourneyKey, SourceEnd], None]


class HandoffSource:
    """All handoffs that one worker is the source of.

    `begin`, `release`, `renew`, `tick` and the callbacks belong to the event loop's thread; `publish`, `finish` and
    `fail` may be called from any thread and never block on the network.

    Args:
        arena: where the blocks are.
        address: of the gRPC server that carries `servicer()`.
        epoch: this life of the process, 32 hexadecimal digits.
        transports: what pullers may connect to; started and stopped with the source.
    """

    def __init__(
        self, *, arena: Arena, fingerprint: str, worker_id: str, epoch: str, address: str, settings: TransferSettings,
        transports: Sequence[SourceTransport], checksums: Checksums, clock: Clock,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Starts the transports, the publishing thread and a timer that calls `tick`."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Ends every handoff (released) and stops what `start` started."""
        raise NotImplementedError

    def servicer(self) -> worker_pb2_grpc.KvSourceServicer:
        """To be added to the worker's gRPC server. The server checks the cluster secret."""
        raise NotImplementedError

    def begin(
        self, key: JourneyKey, *, block_ids: Sequence[int], num_tokens: int, num_held_blocks: int, lease_ms: int,
        on_end: OnEnd,
    ) -> SourceInfo:
        """Starts a handoff. The caller holds `block_ids` (which cover `num_tokens` slots, the held ones included)
        until `on_end(key, reason)`, which is called exactly once, in the event loop's thread.

        The same key again answers the same info and keeps the first `on_end`; a higher attempt ends the lower one.

        Raises:
            Gone: the journey was released up to this attempt, or a higher attempt was seen.
        """
        raise NotImplementedError

    def publish(self, key: JourneyKey, component: int, num_valid_tokens: int) -> None:
        """The first `num_valid_tokens` slots of a component are final. From any thread; late calls are ignored."""
        raise NotImplementedError

    def finish(self, key: JourneyKey, closing: Closing) -> None:
        """Everything is published. From any thread. With a `finish_reason` the pins end at once (released)."""
        raise NotImplementedError

    def fail(self, key: JourneyKey, error: PdRelayError) -> None:
        """The prompt will not be computed: the puller is told, the pins end. From any thread."""
        raise NotImplementedError

    def renew(self, key: JourneyKey) -> bool:
        """The router vouches for the journey: the lease starts anew. False: it is gone."""
        raise NotImplementedError

    def release(self, journey_id: str, up_to_attempt: int) -> None:
        """Ends the journey's handoff up to that attempt, and refuses such attempts for a while."""
        raise NotImplementedError

    def tick(self, now_s: float) -> None:
        """Ends what has expired by `now_s` on the source's clock."""
        raise NotImplementedError

    @property
    def num_pins(self) -> int:
        """Handoffs whose blocks are pinned."""
        raise NotImplementedError
