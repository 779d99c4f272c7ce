"""The source's side of handoffs: pins blocks, publishes what is computed, ends on commit, release or expiry.

A shell: `source_book.SourceBook` decides, `publisher.Publisher` checksums in its own thread, `source_service` talks
gRPC, the transports serve the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from kv_transfer.geometry import final_slots
from kv_transfer.host import host_id
from kv_transfer.journey import Clock, JourneyKey, SourceInfo
from kv_transfer.manifest import Closing, Failed, Opening, Records
from kv_transfer.manifest_wire import MAX_LEASE_MS
from kv_transfer.publisher import Progress, Publisher
from kv_transfer.source_book import SourceBook
from kv_transfer.source_service import Holder, KvSourceService, PieceStreams
from kv_transfer.source_state import MARGIN_S, SourceEnd, SourceHandoff
from kv_transfer.ticker import OnCrash, Ticker, ignore_crash, tick_s
from kv_transfer.transport import Checksums, SourceTransport
from pd_engine.cache.arena import Arena
from pd_engine.cache.layout import CacheLayout
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import PdRelayError
from pd_engine.service.ids import NewId, random_id
from pd_engine.settings import TransferSettings

log = logging.getLogger(__name__)

OnEnd = Callable[[JourneyKey, SourceEnd], None]


class HandoffSource:
    """All handoffs that one worker is the source of.

    `begin`, `release`, `renew`, `tick` and the callbacks belong to the event loop's thread; `publish`, `finish` and
    `fail` may be called from any thread and never block on the network.

    Args:
        arena: where the blocks are.
        address: of the gRPC server that carries `servicer()`; may be set before the first `begin`.
        epoch: this life of the process, 32 hexadecimal digits.
        transports: what pullers may connect to; started and stopped with the source.
        new_id: names for capabilities.
        publisher: announces pieces in its own thread.
        on_crash: its books are broken: nothing expires any more.
    """

    def __init__(
        self, *, arena: Arena, fingerprint: str, worker_id: str, epoch: str, address: str, settings: TransferSettings,
        transports: Sequence[SourceTransport], checksums: Checksums, clock: Clock, new_id: NewId = random_id,
        publisher: type[Publisher] = Publisher, on_crash: OnCrash = ignore_crash,
    ) -> None:
        self.address = address
        self._arena = arena
        self._fingerprint = fingerprint
        self._worker_id = worker_id
        self._epoch = epoch
        self._settings = settings
        self._transports = transports
        self._clock = clock
        self._new_id = new_id
        self._host_id = host_id()
        self._book = SourceBook(epoch)
        self._on_end: dict[JourneyKey, OnEnd] = {}
        self._on_crash = on_crash
        self._streams = PieceStreams()
        self._publisher = publisher(
            checksums if settings.checksums else None,
            on_records=lambda key, records: self._in_loop(self._published, key, records),
            on_closing=lambda key, closing: self._in_loop(self._closed, key, closing),
            on_error=lambda key, error: self._in_loop(self._failed, key, error),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_started = False
        self._ticker = Ticker(
            "kv-source-ticks", tick_s(settings.lease_ms), self._tick_now, on_crash
        )

    @property
    def layout(self) -> CacheLayout:
        return self._arena.layout

    async def start(self) -> None:
        """Starts the transports, the publishing thread and a timer that calls `tick`."""
        self._loop = asyncio.get_running_loop()
        for transport in self._transports:
            await transport.start(self._arena, self._epoch, self._readable_blocks)
        self._publisher.start()
        self._ticker.start()
        self._is_started = True

    async def stop(self) -> None:
        """Ends every handoff (released) and stops what `start` started. Safe to call twice."""
        for key in self._book.live_keys():
            self.release(key.journey_id, key.attempt)
        if not self._is_started:
            return
        self._is_started = False
        await self._ticker.stop()
        await asyncio.to_thread(self._publisher.stop)
        for transport in self._transports:
            await transport.stop()

    def servicer(self, holder: Holder | None = None) -> worker_pb2_grpc.KvSourceServicer:
        """To be added to the worker's gRPC server. The server checks the cluster secret and types the errors.

        Args:
            holder: of prefixes for other workers; None: there are none.
        """
        return KvSourceService(
            self, self._book, self._streams, self._clock, self._epoch, holder, max_lease_ms=self._settings.lease_ms
        )

    def has_journey(self, journey_id: str) -> bool:
        """Whether a handoff of it is under way."""
        return self._book.has_journey(journey_id)

    def begin(
        self, key: JourneyKey, *, block_ids: Sequence[int], num_tokens: int, num_held_blocks: int, lease_ms: int,
        on_end: OnEnd, is_renewable: bool = True,
    ) -> SourceInfo:
        """Starts a handoff. The caller holds `block_ids` (which cover `num_tokens` slots, the held ones included)
        until `on_end(key, reason)`, which is called exactly once, in the event loop's thread.

        The same key again answers the same info and keeps the first `on_end`; a higher attempt ends the lower one.

        Args:
            is_renewable: False: the pins end with this lease, whatever anybody says.

        Raises:
            Gone: the journey was released up to this attempt, or a higher attempt was seen.
            FailedPrecondition: blocks are held, and the layout has components that cannot be shared.
        """
        layout = self._arena.layout
        final_slots(layout, num_tokens, num_held_blocks)  # raises before anything is taken in
        ids = tuple(block_ids[: layout.num_blocks_for(num_tokens)])
        assert len(set(ids)) == layout.num_blocks_for(num_tokens), f"{key}: {len(ids)} blocks for {num_tokens} tokens"
        now_s = self._clock()
        deadline_s = now_s + lease_ms / 1000 + MARGIN_S
        new = SourceHandoff(
            key=key, token=self._new_id(), block_ids=ids,
            generations=tuple(int(self._arena.generations[block]) for block in ids), num_tokens=num_tokens,
            num_held_blocks=num_held_blocks, deadline_s=deadline_s,
            last_deadline_s=math.inf if is_renewable else deadline_s,
        )
        handoff = self._book.begin(new, now_s)
        if handoff is new:
            self._on_end[key] = on_end
            self._publisher.begin(
                key, Progress(self._arena, ids, new.generations, num_tokens, num_held_blocks)
            )
        self.settle()
        return SourceInfo(address=self.address, epoch=self._epoch, token=handoff.token)

    def publish(self, key: JourneyKey, component: int, num_valid_tokens: int) -> None:
        """The first `num_valid_tokens` slots of a component are final. From any thread; late calls are ignored."""
        self._publisher.publish(key, component, num_valid_tokens)

    def finish(self, key: JourneyKey, closing: Closing) -> None:
        """Everything is published, or with a `finish_reason` all that will be. From any thread."""
        self._publisher.finish(key, closing)

    def fail(self, key: JourneyKey, error: PdRelayError) -> None:
        """The prompt will not be computed: the puller is told, the pins end. From any thread."""
        self._in_loop(self._failed, key, error)

    def renew(self, key: JourneyKey) -> bool:
        """The router vouches for the journey: the lease starts anew. False: it is gone."""
        handoff = self._book.get(key)
        if handoff is not None:
            self._book.renew(handoff, self._settings.lease_ms, self._clock())
        return handoff is not None

    def release(self, journey_id: str, up_to_attempt: int) -> None:
        """Ends the journey's handoff up to that attempt, and refuses such attempts for a while."""
        self._book.release(journey_id, up_to_attempt, self._clock())
        self.settle()

    def tick(self, now_s: float) -> None:
        """Ends what has expired by `now_s` on the source's clock."""
        self._book.tick(now_s)
        self.settle()

    @property
    def num_pins(self) -> int:
        """Handoffs whose blocks are pinned."""
        return self._book.num_pins

    def opening(self, handoff: SourceHandoff) -> Opening:
        """The first part of a handoff's manifest."""
        return Opening(
            worker_id=self._worker_id, epoch=self._epoch, fingerprint=self._fingerprint, layout=self._arena.layout,
            host_id=self._host_id, num_tokens=handoff.num_tokens, num_held_blocks=handoff.num_held_blocks,
            num_arena_blocks=self._arena.num_blocks,
            lease_ms=min(max(0, round((handoff.deadline_s - self._clock()) * 1000)), MAX_LEASE_MS),
            checksums=self._settings.checksums,
            transports={transport.name: transport.metadata() for transport in self._transports},
        )

    def settle(self) -> None:
        """Tells whoever must know of the handoffs that have ended: their owner, their stream, the publisher. If that
        breaks, the worker does: who owns the blocks does not know it."""
        try:
            for handoff in self._book.take_ended():
                self._publisher.forget(handoff.key)
                self._streams.wake(handoff)
                self._on_end.pop(handoff.key)(handoff.key, SourceEnd(handoff.state.value))
        except Exception as error:
            log.exception("the books of handoffs are broken")
            self._in_loop(self._on_crash, error)
            raise

    def _readable_blocks(self, token: str) -> frozenset[int] | None:
        """What a transport's own threads ask before they read."""
        handoff = self._book.by_token(token)
        return None if handoff is None else handoff.readable

    def _published(self, key: JourneyKey, records: Records) -> None:
        self._streams.wake(self._book.publish(key, records))

    def _closed(self, key: JourneyKey, closing: Closing) -> None:
        self._streams.wake(self._book.close(key, closing))

    def _failed(self, key: JourneyKey, error: PdRelayError) -> None:
        self._book.fail(key, Failed(code=error.code, message=error.message), self._clock())
        self.settle()

    def _in_loop(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "not started"
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.info("a publication came after the event loop was closed")

    async def _tick_now(self) -> None:
        self.tick(self._clock())
