"""Fetches the cached beginning of a prompt from the worker that has it, before the rest is computed.

A job that has just got its blocks asks the holder to pin its own, gives its blocks to a lease on as many, pulls into
them, and has them back filled. Whatever goes wrong, and whatever is not done after `prefix_fetch_ms`, ends the fetch:
the prompt is computed then. Other jobs go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.destination import HandoffDestination, PullResult
from kv_transfer.journey import JourneyKey, PrefixSource
from kv_transfer.prefix_calls import HeldPrefix, WantedPrefix
from pd_engine.errors import DeadlineExceeded, PdRelayError
from pd_engine.service.ids import NewId
from prefill_worker.blocks import PromptBlocks
from prefill_worker.job import Job

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Fetch:
    """Attributes:
    key: of this fetch alone.
    deadline_s: on the event loop's clock.
    held: what is being pulled; None while the holder is asked.
    """

    job: Job
    key: JourneyKey
    holder: PrefixSource
    deadline_s: float
    timer: asyncio.TimerHandle
    held: HeldPrefix | None = None
    asking: asyncio.Task[None] | None = None


class PrefixFetcher:
    """All fetches of one prefill worker. Belongs to the event loop's thread.

    Args:
        epoch: of this worker: it asks nothing of itself.
        fetch_ms: of one fetch at most; 0: nothing is fetched.
        on_end: a fetch has ended. The job has its blocks, or it holds none and is to be given blocks again; it is not
            called for a fetch that was stopped.

    `destination` is given after construction, as its callbacks are this object's.
    """

    destination: HandoffDestination

    def __init__(
        self, blocks: PromptBlocks, *, epoch: str, fetch_ms: int, block_size: int, on_end: Callable[[Job], None],
        new_id: NewId,
    ) -> None:
        self._blocks = blocks
        self._epoch = epoch
        self._fetch_ms = fetch_ms
        self._block_size = block_size
        self._on_end = on_end
        self._new_id = new_id
        self._fetches: dict[JourneyKey, _Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, job: Job) -> bool:
        """Of a job that has just got its blocks: True if `on_end` or `stop` follows. One job fetches once."""
        holder = job.spec.prefix_holder
        if holder is None or job.num_cached_blocks >= self._num_wanted(job, holder) or job.tried_to_fetch:
            return False
        if not self._fetch_ms or holder.epoch == self._epoch or job.spec.bypass_prefix_cache:
            return False
        loop = asyncio.get_running_loop()
        job.tried_to_fetch = True
        key = JourneyKey(self._new_id(), 1)
        fetch = self._fetches[key] = _Fetch(
            job=job, key=key, holder=holder, deadline_s=loop.time() + self._fetch_ms / 1000,
            timer=loop.call_later(self._fetch_ms / 1000, self._late, key),
        )
        fetch.asking = asyncio.create_task(self._ask(fetch), name=f"prefix for {job.name}")
        self._tasks.add(fetch.asking)
        fetch.asking.add_done_callback(self._tasks.discard)
        return True

    def stop(self, job: Job) -> None:
        """The job has ended: so has its fetch, if one is under way. It holds no blocks then, or its own."""
        for fetch in [fetch for fetch in self._fetches.values() if fetch.job is job]:
            self._forget(fetch)
            self._let_go(fetch)

    async def close(self) -> None:
        """After the last `stop`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What the destination reports

    def on_pulled(self, key: JourneyKey, result: PullResult) -> None:
        fetch = self._fetches[key]
        assert fetch.held is not None, key
        self._forget(fetch)
        self._blocks.fetched(fetch.job, key.owner, result.block_ids, fetch.held.num_blocks)
        log.debug("%s: %d blocks from %s", fetch.job.name, fetch.held.num_blocks, fetch.holder.address)
        self._on_end(fetch.job)

    def on_pull_failed(self, key: JourneyKey, error: PdRelayError, missing_blocks: tuple[int, ...]) -> None:
        if key in self._fetches:
            self._fail(self._fetches[key], error)

    # Inside

    def _num_wanted(self, job: Job, holder: PrefixSource) -> int:
        return 0 if job.chain is None else min(holder.num_blocks, job.chain.num_blocks)

    async def _ask(self, fetch: _Fetch) -> None:
        job, chain = fetch.job, fetch.job.chain
        assert chain is not None, job.name
        num_wanted = self._num_wanted(job, fetch.holder)
        token_ids = job.spec.choice.token_ids[: num_wanted * self._block_size]
        wanted = WantedPrefix(
            block_hashes=chain.hashes[:num_wanted], token_ids=token_ids,
            cache_salt=job.spec.cache_salt, num_held_blocks=job.num_cached_blocks,
        )
        try:
            held = await self.destination.hold(fetch.key, fetch.holder, wanted, self._fetch_ms)
        except PdRelayError as error:
            self._fail(fetch, error)
            return
        if held is None:
            self._forget(fetch)
            self._on_end(job)
        else:
            self._pull(fetch, held)

    def _pull(self, fetch: _Fetch, held: HeldPrefix) -> None:
        job = fetch.job
        left_s = fetch.deadline_s - asyncio.get_running_loop().time()
        fetch.held = held
        self._blocks.give_up_fresh(job)  # room for the lease
        lease = self.destination.reserve(
            fetch.key, num_tokens=held.num_blocks * self._block_size, num_blocks=job.num_blocks,
            held_block_ids=job.block_ids, lease_ms=max(1, round(left_s * 1000)), is_prefix=True,
        )
        self._blocks.release(job)
        self.destination.pull(fetch.key, lease.lease_id, held.source)

    def _late(self, key: JourneyKey) -> None:
        self._fail(self._fetches[key], DeadlineExceeded(f"it took longer than {self._fetch_ms} ms"))

    def _fail(self, fetch: _Fetch, error: PdRelayError) -> None:
        log.info("%s: no prefix from %s, it is computed: %s", fetch.job.name, fetch.holder.address, error.message)
        self._forget(fetch)
        self._let_go(fetch)
        self._on_end(fetch.job)

    def _forget(self, fetch: _Fetch) -> None:
        fetch.timer.cancel()
        del self._fetches[fetch.key]

    def _let_go(self, fetch: _Fetch) -> None:
        """Of what the holder pins, and of the lease, whose end the holder is told by the destination."""
        if fetch.held is not None:
            self.destination.release(fetch.key.journey_id, fetch.key.attempt)
            return
        assert fetch.asking is not None
        if fetch.asking is not asyncio.current_task():
            fetch.asking.cancel()
        self.destination.let_go(fetch.key, fetch.holder.address, fetch.holder.epoch)
