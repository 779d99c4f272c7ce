"""The destination's side of handoffs: leases on blocks, pulls into them, checks, and passes them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio
import numpy as np
import numpy.typing as npt

from kv_transfer.journey import Clock, JourneyKey, SourceInfo
from kv_transfer.manifest import Closing
from kv_transfer.publisher import Checksums
from kv_transfer.transport import PullTransport
from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.errors import PdRelayError
from pd_engine.settings import TransferSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A deadline-bound right to blocks of this worker.

    Attributes:
        lease_id: 32 hexadecimal digits.
        lease_ms: how long it lives without renewal.
        num_held_blocks: leading blocks that need not be sent: those given to `reserve`, or those that an earlier
            attempt has verified.
        block_ids: all blocks of the sequence in order, the held ones first.
    """

    lease_id: str
    lease_ms: int
    num_held_blocks: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PullResult:
    """A handoff that is complete and verified.

    Attributes:
        block_ids: now the caller's, held in the pool under `key.owner`; empty if the first token ended the request
            (`closing.finish_reason` is set): then the lease has been released.
        num_bytes: valid slots not already held x bytes a token.
        checksums: uint64 [components, blocks of the prompt], each over the valid slots; 0 for held blocks.
    """

    block_ids: tuple[int, ...]
    closing: Closing
    num_bytes: int
    transport: str
    checksums: npt.NDArray[np.uint64]


OnComplete = Callable[[JourneyKey, PullResult], None]
OnFailed = Callable[[JourneyKey, PdRelayError, tuple[int, ...]], None]


class HandoffDestination:
    """All handoffs that one worker is the destination of. Everything belongs to the event loop's thread.

    Args:
        pool: where leases take their blocks; held under `JourneyKey.owner`.
        open_channel: a channel to a source's address, with the cluster secret; closed by the destination.
        on_complete: ownership of the blocks passes with the call.
        on_failed: the pull has ended without success; arguments are the error and the logical numbers of the blocks
            that are missing. The lease lives on until `release`, expiry or a `reserve` with a higher attempt, which
            keeps the leading verified blocks. If the lease itself has expired the error is DeadlineExceeded.
    """

    def __init__(
        self, *, arena: Arena, pool: BlockPool, fingerprint: str, worker_id: str, epoch: str,
        settings: TransferSettings, transports: Sequence[PullTransport], checksums: Checksums, clock: Clock,
        open_channel: Callable[[str], grpc.aio.Channel], on_complete: OnComplete, on_failed: OnFailed,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Starts the timer that calls `tick`."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Releases every lease, waits (bounded) for transfers in flight, closes channels and connections."""
        raise NotImplementedError

    def reserve(
        self, key: JourneyKey, *, num_tokens: int, num_blocks: int, held_block_ids: Sequence[int] = (),
        lease_ms: int | None = None,
    ) -> Lease:
        """Grants a lease on `num_blocks` blocks in all, of which the leading `held_block_ids` (full blocks that
        somebody owns, a cached prefix) are shared and the others allocated; the lease holds them all.

        The same key again answers the same lease; a higher attempt takes the journey's lease over.

        Args:
            num_tokens: prompt tokens that will be handed over; `num_blocks` must cover them.
            lease_ms: None means the setting.

        Raises:
            Gone: released up to this attempt, or a higher attempt was seen.
            ResourceExhausted: too few free blocks.
        """
        raise NotImplementedError

    def pull(self, key: JourneyKey, lease_id: str, source: SourceInfo) -> None:
        """Starts pulling and returns; `on_complete` or `on_failed` follows exactly once, unless `release` comes
        first: then neither does. The same call again does nothing.

        Raises:
            Gone: there is no such lease.
        """
        raise NotImplementedError

    def renew(self, key: JourneyKey) -> bool:
        """The router vouches for the journey: the lease starts anew. False: it is gone (or handed over)."""
        raise NotImplementedError

    def release(self, journey_id: str, up_to_attempt: int) -> None:
        """Ends the journey's lease up to that attempt, and refuses such attempts for a while. Blocks with a transfer
        in flight are quarantined until it has ended; blocks already handed over are not touched."""
        raise NotImplementedError

    def tick(self, now_s: float) -> None:
        """Ends what has expired by `now_s` on the destination's clock."""
        raise NotImplementedError

    @property
    def num_leases(self) -> int:
        """Leases that hold blocks and are not handed over."""
        raise NotImplementedError

    @property
    def num_quarantined(self) -> int:
        """Blocks that wait for a transfer to end."""
        raise NotImplementedError
