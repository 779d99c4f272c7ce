"""The destination's side of handoffs: leases on blocks, pulls into them, checks, and passes them on.

A shell: `destination_book.DestinationBook` decides; this starts and stops what it says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc.aio

from kv_transfer.destination_book import DestinationBook
from kv_transfer.destination_state import Broke, Completed, Ended, LeaseRecord, LeaseState
from kv_transfer.host import host_id
from kv_transfer.journey import Clock, JourneyKey, PrefixSource, SourceInfo
from kv_transfer.lease import Lease, OnComplete, OnExpired, OnFailed, PullResult
from kv_transfer.manifest import Hello
from kv_transfer.peers import Peers
from kv_transfer.prefix_calls import HeldPrefix, PrefixCalls, WantedPrefix
from kv_transfer.pull import PullDesk
from kv_transfer.ticker import OnCrash, Ticker, ignore_crash, tick_s
from kv_transfer.transfer_totals import TransferTotals
from kv_transfer.transport import Checksums, PullTransport
from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.service.ids import NewId, random_id
from pd_engine.settings import TransferSettings

log = logging.getLogger(__name__)

def _ignore(key: JourneyKey) -> None:
    return


class HandoffDestination:
    """All handoffs that one worker is the destination of. Everything belongs to the event loop's thread.

    Args:
        pool: where leases take their blocks; held under `JourneyKey.owner`.
        transports: best first.
        open_channel: a channel to a source's address, with the cluster secret; closed by the destination.
        on_complete: ownership of the blocks passes with the call.
        on_failed: the pull has ended without success; arguments are the error and the logical numbers of the blocks
            that are missing. The lease lives on until `release`, expiry or a `reserve` with a higher attempt, which
            keeps the leading verified blocks.
        on_expired: a lease has ended because nobody renewed it (after `on_failed` if it was pulling).
        on_crash: its books are broken: nothing expires any more.
        new_id: names for leases.
    """

    def __init__(
        self, *, arena: Arena, pool: BlockPool, fingerprint: str, worker_id: str, epoch: str,
        settings: TransferSettings, transports: Sequence[PullTransport], checksums: Checksums, clock: Clock,
        open_channel: Callable[[str], grpc.aio.Channel], on_complete: OnComplete, on_failed: OnFailed,
        on_expired: OnExpired = _ignore, on_crash: OnCrash = ignore_crash, new_id: NewId = random_id,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._new_id = new_id
        self._on_complete = on_complete
        self._on_failed = on_failed
        self._on_expired = on_expired
        self._on_crash = on_crash
        self._book = DestinationBook(
            arena.layout, pool, max_bytes_in_flight=settings.max_bytes_in_flight, max_refetches=settings.max_refetches
        )
        hello = Hello(
            worker_id=worker_id, fingerprint=fingerprint, layout=arena.layout, host_id=host_id(),
            transports=tuple(transport.name for transport in transports), checksums=settings.checksums,
            lease_ms=settings.lease_ms,
        )
        self._peers = Peers(transports, open_channel, hello.host_id, clock)
        self._prefixes = PrefixCalls(self._peers)
        self._desk = PullDesk(
            self._book, self._peers, arena=arena, hello=hello, epoch=epoch, settings=settings, checksums=checksums,
            clock=clock, settle=self._settle,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.Task[None] | None = None
        self._ticker = Ticker(
            "kv-destination-ticks", tick_s(settings.lease_ms), self._tick_and_sweep, on_crash
        )

    async def start(self) -> None:
        """Starts the timer that calls `tick`."""
        self._ticker.start()

    async def stop(self) -> None:
        """Releases every lease, waits (bounded) for transfers in flight, closes channels and connections."""
        await self._ticker.stop()
        for key in self._book.live_keys():
            self.release(key.journey_id, key.attempt)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._peers.close()

    def reserve(
        self, key: JourneyKey, *, num_tokens: int, num_blocks: int, held_block_ids: Sequence[int] = (),
        lease_ms: int | None = None, is_prefix: bool = False,
    ) -> Lease:
        """Grants a lease on `num_blocks` blocks in all, of which the leading `held_block_ids` (full blocks that
        somebody owns, a cached prefix) are shared and the others allocated; the lease holds them all.

        The same key again answers the same lease; a higher attempt takes the journey's lease over.

        Args:
            num_tokens: prompt tokens that will be handed over; `num_blocks` must cover them.
            lease_ms: None means the setting.
            is_prefix: what will be pulled is what `hold` answered; the lease ends when it ends, it is never renewed.

        Raises:
            Gone: released up to this attempt, or a higher attempt was seen.
            ResourceExhausted: too few free blocks; the journey holds none then.
        """
        try:
            lease = self._book.reserve(
                key, lease_id=self._new_id(), lease_ms=lease_ms or self._settings.lease_ms,
                num_tokens=num_tokens, num_blocks=num_blocks, held_block_ids=held_block_ids, now_s=self._clock(),
                is_prefix=is_prefix,
            )
        finally:
            self._settle()
        return Lease(
            lease_id=lease.lease_id, lease_ms=lease.lease_ms, num_held_blocks=lease.num_held_blocks,
            block_ids=lease.block_ids,
        )

    async def hold(
        self, key: JourneyKey, holder: PrefixSource, wanted: WantedPrefix, lease_ms: int
    ) -> HeldPrefix | None:
        """Asks another worker to pin what it has of a prefix: see `PrefixCalls.hold`. Afterwards `reserve` and `pull`
        it, or `let_go`."""
        return await self._prefixes.hold(key, holder, wanted, lease_ms)

    def let_go(self, key: JourneyKey, address: str, epoch: str) -> None:
        """What was to be held there, or is, is not wanted any more."""
        timeout_s = self._settings.fetch_timeout_ms / 1000
        self._start(self._prefixes.let_go(key, address, epoch, timeout_s), "kv-let-go")

    def pull(self, key: JourneyKey, lease_id: str, source: SourceInfo) -> None:
        """Starts pulling and returns; `on_complete` or `on_failed` follows exactly once, unless `release` or a
        `reserve` with a higher attempt comes first: then neither does. The same call again does nothing.

        Raises:
            Gone: there is no such lease.
        """
        lease = self._book.pull(key, lease_id, source, self._clock())
        if lease is not None:
            self._start_vital(self._desk.run(lease, source), f"kv-pull-{key.journey_id}-{key.attempt}")

    def keep(self, key: JourneyKey, lease_id: str) -> Lease:
        """Nothing will be pulled: the lease ends, and its blocks pass to the caller, held in the pool under
        `key.owner`. `num_held_blocks` of them have their contents.

        Raises:
            Gone: there is no such lease, or it is being pulled.
        """
        lease = self._book.keep(key, lease_id, self._clock())
        return Lease(
            lease_id=lease.lease_id, lease_ms=lease.lease_ms, num_held_blocks=lease.num_held_blocks,
            block_ids=lease.block_ids,
        )

    def renew(self, key: JourneyKey) -> bool:
        """The router vouches for the journey: the lease starts anew. False: it is gone (or handed over)."""
        return self._book.renew(key, self._clock())

    def release(self, journey_id: str, up_to_attempt: int) -> None:
        """Ends the journey's lease up to that attempt, and refuses such attempts for a while. Blocks with a transfer
        in flight are quarantined until it has ended; blocks already handed over are not touched."""
        self._book.release(journey_id, up_to_attempt, self._clock())
        self._settle()

    def tick(self, now_s: float) -> None:
        """Ends what has expired by `now_s` on the destination's clock; asks sources whose turn it is."""
        self._book.tick(now_s)
        for lease in self._book.renewals_due(now_s):
            self._start(self._desk.renew(lease, now_s), "kv-renew")
        self._settle()

    @property
    def num_leases(self) -> int:
        """Leases that hold blocks and are not handed over."""
        return self._book.num_leases

    @property
    def bytes_per_s(self) -> float:
        """At which fetches come in; 0: not yet measured."""
        return self._desk.bytes_per_s.value

    @property
    def totals(self) -> TransferTotals:
        """Of this life."""
        return self._desk.totals

    @property
    def num_quarantined(self) -> int:
        """Blocks that wait for a transfer to end."""
        return self._book.num_quarantined

    def _settle(self) -> None:
        """Acts on what the book says has happened, then fetches what may be fetched. If that breaks, the worker does:
        whoever owns the blocks does not know it."""
        try:
            self._act()
        except Exception as error:
            log.exception("the books of handoffs are broken")
            asyncio.get_running_loop().call_soon(self._on_crash, error)
            raise

    def _act(self) -> None:
        for news in self._book.take_news():
            match news:
                case Completed(lease):
                    self._desk.stop_manifest(lease)
                    self._complete(lease)
                case Broke(lease, error, missing):
                    self.totals.num_failed_pulls += 1
                    self._desk.stop_manifest(lease)
                    self._on_failed(lease.key, error, missing)
                case Ended(lease):
                    self._desk.stop_manifest(lease)
                    self._desk.stop_fetches(lease)
                    if lease.is_prefix and lease.source is not None:
                        self.let_go(lease.key, lease.source.address, lease.source.epoch)
                    if lease.state is LeaseState.EXPIRED:
                        self.totals.num_expired_leases += 1
                        self._on_expired(lease.key)
        while (fetch := self._book.next_fetch()) is not None:
            self._start_vital(self._desk.fetch(fetch), "kv-fetch")

    def _complete(self, lease: LeaseRecord) -> None:
        assert lease.closing is not None and lease.source is not None and lease.pieces is not None
        is_finished, now_s = lease.state is LeaseState.FINISHED, self._clock()
        self._start(self._desk.commit(lease.key, lease.source), "kv-commit")
        result = PullResult(
            block_ids=() if is_finished else lease.block_ids, closing=lease.closing,
            num_bytes=0 if is_finished else lease.pieces.num_bytes,
            num_hidden_bytes=0 if is_finished else lease.num_hidden_bytes, pull_s=now_s - lease.pulling_s,
            exposed_s=now_s - lease.closed_s, transport=lease.transport,
            checksums=lease.pieces.checksums_CB,
        )
        self._on_complete(lease.key, result)

    def _start_vital(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Nobody else would end what it has begun: if it breaks, the worker does."""
        self._start(work, name).add_done_callback(self._vital_ended)

    def _vital_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            log.error("%s broke: the books of handoffs are not true any more", task.get_name(), exc_info=error)
            self._on_crash(error)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tick_and_sweep(self) -> None:
        self.tick(self._clock())
        if self._sweep is None or self._sweep.done():  # no lease waits for a connection that is slow to close
            if self._sweep is not None:
                self._sweep.result()
            self._sweep = None if self._peers.is_empty else self._start(self._peers.sweep(), "kv-sweep")
