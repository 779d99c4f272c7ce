"""One fetch of a prompt's beginning: the job has its blocks back filled, or is to be given blocks again."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable

import pytest

from kv_transfer.destination import HandoffDestination
from kv_transfer.journey import PrefixSource
from kv_transfer.manifest import Closing
from kv_transfer.prefix_fetch import PrefixFetcher
from kv_transfer.transports import pull_transports
from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.prefix import PrefixCache
from pd_engine.priority import Turn
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import connect
from pd_engine.service.ids import random_id
from pd_engine.service.requests import Choice
from pd_engine.settings import TransferSettings
from pd_kernels.block_checksum.ranges import range_checksums
from prefill_worker.blocks import PromptBlocks
from prefill_worker.job import Job, PrefillSpec
from support.handoffs import FINGERPRINT, LAYOUT, SECRET, SourceSide, new_key, slots_of
from support.leaks import assert_nothing_left, assert_pool_is_free, until

TOKENS = list(range(100, 170))  # four blocks and a tail
LONG_MS = 30_000


class Fetching:
    """A holder with four blocks, and a prefill worker's fetcher without a worker around it."""

    def __init__(self, fetch_ms: int) -> None:
        settings = TransferSettings()
        self.holder = SourceSide()
        self.arena = Arena(LAYOUT, 8)
        self.pool = BlockPool(8, on_reuse=self.arena.renew)
        self.cache = PrefixCache(self.pool, fingerprint=FINGERPRINT, block_size=LAYOUT.block_size)
        self.blocks = PromptBlocks(self.pool, self.cache, block_size=LAYOUT.block_size, with_mtp=True)
        self.ended: list[Job] = []
        self.sent: list[bytes] = []  # what the holder has
        self.fetcher: PrefixFetcher[Job] = PrefixFetcher(
            self.blocks, epoch=random_id(), fetch_ms=fetch_ms, block_size=LAYOUT.block_size,
            on_end=self.ended.append, new_id=random_id,
        )
        self.fetcher.destination = HandoffDestination(
            arena=self.arena, pool=self.pool, fingerprint=FINGERPRINT, worker_id="p", epoch=random_id(),
            settings=settings, transports=pull_transports(settings, self.arena, secret=SECRET),
            checksums=range_checksums, clock=time.monotonic, open_channel=lambda address: connect(address, SECRET),
            on_complete=self.fetcher.on_pulled, on_failed=self.fetcher.on_pull_failed,
        )

    def job(self) -> Job:
        """That has its blocks."""
        params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=2)
        choice = Choice(
            token_ids=tuple(TOKENS), num_prompt_tokens=len(TOKENS), params=params, ending_ids=frozenset(), speculate=0,
        )
        spec = PrefillSpec(
            key=new_key(), router_id="r", choice=choice, lease_ms=1_000, num_held_blocks=0, deadline_ms=0,
            no_handoff=True, bypass_prefix_cache=False, cache_salt="",
            prefix_holder=PrefixSource(address=self.holder.source.address, epoch=self.holder.epoch, num_blocks=4),
        )
        job = self.blocks.new_job(spec, Turn(priority=0, arrived_s=0.0, deadline_s=None))
        self.blocks.take(job)
        return job

    def begin(self, job: Job) -> bool:
        """Its fetch, if there is one: as the worker's core does it."""
        wish = self.blocks.wish(job)
        job.tried_to_fetch = wish is not None and self.fetcher.start(job, wish)
        return job.tried_to_fetch

    def stall(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is held is never announced: the pull has begun, and nothing comes."""
        def nothing(*_: object) -> None: ...

        monkeypatch.setattr(self.holder.source, "publish", nothing)
        monkeypatch.setattr(self.holder.source, "finish", nothing)

    async def until_pulling(self) -> None:
        await until(lambda: self.fetcher.destination.num_leases == 1)


@pytest.fixture
async def start() -> AsyncIterator[Callable[[int], Fetching]]:
    made: list[Fetching] = []

    def make(fetch_ms: int = LONG_MS) -> Fetching:
        made.append(Fetching(fetch_ms))
        return made[-1]

    async with assert_nothing_left(except_files="pd-relay-arena"):
        yield make
        for each in made:
            await each.fetcher.close()
            await each.fetcher.destination.stop()
            await each.holder.stop()
            each.cache.check_integrity()
            assert_pool_is_free(each.pool)
            assert_pool_is_free(each.holder.pool)
            each.arena.close()
        made.clear()


async def begun(fetching: Fetching) -> Job:
    await fetching.holder.start()
    await fetching.fetcher.destination.start()
    fetching.sent = slots_of(fetching.holder.arena, fetching.holder.keep(TOKENS), 64)
    job = fetching.job()
    assert fetching.begin(job)
    return job


async def test_the_job_has_its_blocks_back_filled(start: Callable[..., Fetching]) -> None:
    fetching = start()
    job = await begun(fetching)
    await until(lambda: fetching.ended == [job])
    assert (len(job.block_ids), job.num_cached_blocks, fetching.blocks.num_cached_tokens(job)) == (5, 4, 64)
    assert slots_of(fetching.arena, job.block_ids, 64) == fetching.sent
    assert all(fetching.pool.owners(block) == (job.name,) for block in job.block_ids)
    assert not fetching.begin(job), "one job fetches once"
    other = fetching.job()
    assert (other.num_cached_blocks, fetching.begin(other)) == (4, False)
    for each in (job, other):
        fetching.blocks.release(each)
    await until(lambda: fetching.holder.source.num_pins == 0)


async def test_a_fetch_that_takes_too_long_leaves_the_job_without_blocks(
    start: Callable[..., Fetching], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to be given blocks again, and holds nothing here or there."""
    fetching = start(1_500)  # the pull begins long before
    fetching.stall(monkeypatch)
    job = await begun(fetching)
    await until(lambda: fetching.ended == [job])
    assert not job.holds_blocks
    await until(lambda: fetching.holder.source.num_pins == 0)
    assert fetching.fetcher.destination.num_leases == 0


@pytest.mark.parametrize("what", ["dies", "releases", "fails"])
async def test_a_holder_that_gives_up_in_the_middle(
    start: Callable[..., Fetching], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Long before the fetch's own time is over: its life ends, its pins do, or what it sends is not what was asked."""
    fetching = start()
    fetching.stall(monkeypatch)
    job = await begun(fetching)
    await fetching.until_pulling()
    source = fetching.holder.source
    [key] = list(fetching.holder.holder._holds)
    if what == "dies":
        await source.stop()
    elif what == "releases":
        source.release(key.journey_id, 1)
    else:
        monkeypatch.undo()
        source._publisher._on_closing(key, Closing(first_token_id=None, num_prompt_tokens=64))
    await until(lambda: fetching.ended == [job])
    assert not job.holds_blocks
    assert fetching.fetcher.destination.num_leases == 0
    await until(lambda: source.num_pins == 0)


@pytest.mark.parametrize("is_pulling", [False, True])
async def test_a_job_that_ends_takes_its_fetch_along(
    start: Callable[..., Fetching], monkeypatch: pytest.MonkeyPatch, is_pulling: bool
) -> None:
    fetching = start()
    fetching.stall(monkeypatch)
    job = await begun(fetching)
    if is_pulling:
        await fetching.until_pulling()
    fetching.fetcher.stop(job)
    assert fetching.ended == []
    if job.holds_blocks:
        fetching.blocks.release(job)
    assert job.holds_blocks is False
    await until(lambda: fetching.holder.source.num_pins == 0)


async def test_who_is_not_asked(start: Callable[..., Fetching]) -> None:
    """Another life of the holder leaves the job its own blocks; fetching may be off."""
    fetching = start()
    await fetching.holder.start()
    await fetching.fetcher.destination.start()
    fetching.holder.keep(TOKENS)
    fetching.holder.epoch = secrets.token_hex(16)
    job = fetching.job()
    assert fetching.begin(job)
    await until(lambda: fetching.ended == [job])
    assert (len(job.block_ids), job.num_cached_blocks) == (5, 0)
    fetching.blocks.release(job)
    off = start(0)
    await off.holder.start()
    job = off.job()
    assert not off.begin(job)
    off.blocks.release(job)
