"""Handoffs between real processes: what a signal or a socket does to them. Each on shared memory and tcp, and on nixl
where it is installed."""

from __future__ import annotations

import asyncio
import signal

import pytest

from kv_transfer.journey import JourneyKey, SourceInfo
from pd_engine.errors import Gone, PdRelayError, Unavailable
from support.fork_server import start_fork_server
from support.handoffs import LAYOUT, DestinationSide, SourceSide, new_key, running
from support.leaks import assert_nothing_left, assert_pool_is_free, until
from support.source_calls import (
    NUM_BLOCKS,
    NUM_TOKENS,
    PROCESS_TRANSPORTS,
    assert_freed,
    begin,
    hand_over,
    listen_on,
    publish,
    settings_of,
)
from support.source_process import ends, pins, source_process


@pytest.fixture(autouse=True, scope="module")
def fork_server() -> None:
    start_fork_server()


@pytest.fixture(params=PROCESS_TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def test_two_processes_hand_over(transport: str) -> None:
    settings = settings_of(transport)
    async with assert_nothing_left(except_files="memfd"):
        destination = DestinationSide(settings=settings)
        async with source_process(settings=settings) as source, running(destination):
            for num_tokens in (1, 16, 100):
                await hand_over(source, destination, num_tokens)
            await source.until(pins, (0, 64))  # commits are sent after completion
            assert await source.call(ends) == ["committed"] * 3
        assert_pool_is_free(destination.pool)


async def test_concurrent_handoffs(transport: str) -> None:
    """50 at once between one pair: every piece is right before anything is handed on."""
    settings = settings_of(transport)
    num_tokens = 37
    blocks = 50 * LAYOUT.num_blocks_for(num_tokens)
    destination = DestinationSide(settings=settings, num_blocks=blocks)
    async with source_process(settings=settings, num_blocks=blocks) as source, running(destination):
        keys = [new_key() for _ in range(50)]
        infos = [await begin(source, key, num_tokens) for key in keys]
        sent = [await source.call(SourceSide.contents, key, num_tokens) for key in keys]
        for key, info in zip(keys, infos, strict=True):
            destination.reserve_and_pull(key, num_tokens, info)
        for key in keys:
            await source.call(SourceSide.publish_all, key, num_tokens)
        for key, expected in zip(keys, sent, strict=True):
            assert destination.contents(await destination.result_of(key), num_tokens) == expected
            destination.free(key)
        await source.until(pins, (0, blocks))
        assert_pool_is_free(destination.pool)


async def test_published_too_early(transport: str) -> None:
    """A delayed last layer: nothing of it is read before it was finished, and nothing is complete."""
    settings = settings_of(transport)
    destination = DestinationSide(settings=settings)
    async with source_process(settings=settings) as source, running(destination):
        key = new_key()
        info = await begin(source, key)
        before = bytes(destination.arena.buffer[destination.arena.offsets[2] :])
        destination.reserve_and_pull(key, NUM_TOKENS, info)
        await source.call(publish, key, 0, NUM_TOKENS)
        await source.call(publish, key, 1, NUM_TOKENS)
        book = destination.destination._book
        await until(lambda: book.get(key).pieces is not None and book.get(key).pieces.num_verified_bytes == 2 * 19_200)
        assert bytes(destination.arena.buffer[destination.arena.offsets[2] :]) == before
        assert key not in destination.completed
        sent = await source.call(SourceSide.contents, key, NUM_TOKENS)
        await source.call(SourceSide.publish_all, key, NUM_TOKENS)
        assert destination.contents(await destination.result_of(key), NUM_TOKENS) == sent
        destination.free(key)


@pytest.mark.parametrize("num_components", [0, 1, 2])
async def test_prefill_dies_after_k_layers(transport: str, num_components: int) -> None:
    """The pull fails at once; the lease stays for another prefill worker, which completes it."""
    settings = settings_of(transport)
    destination = DestinationSide(settings=settings)
    async with running(destination), source_process(settings=settings, worker_id="prefill-1") as other:
        key = new_key()
        async with source_process(settings=settings) as source:
            destination.reserve_and_pull(key, NUM_TOKENS, await begin(source, key))
            for component in range(num_components):
                await source.call(publish, key, component, NUM_TOKENS)
            await until(lambda: destination.destination._book.get(key).pieces is not None)
            source.signal(signal.SIGKILL)
            with pytest.raises(Unavailable):
                await destination.result_of(key)
        assert destination.destination.num_leases == 1
        again = JourneyKey(key.journey_id, 2)
        info = await begin(other, again)
        sent = await other.call(SourceSide.contents, again, NUM_TOKENS)
        destination.reserve_and_pull(again, NUM_TOKENS, info)
        await other.call(SourceSide.publish_all, again, NUM_TOKENS)
        assert destination.contents(await destination.result_of(again), NUM_TOKENS) == sent
        destination.free(again)
        await assert_freed(destination)


async def test_a_source_that_dies_after_closing_is_not_missed(transport: str) -> None:
    """`lost-first-reply`, the handoff's part: who has everything needs nobody for the commit."""
    settings = settings_of(transport)
    destination = DestinationSide(settings=settings)
    async with running(destination), source_process(settings=settings) as source:
        key = new_key()
        destination.reserve_and_pull(key, NUM_TOKENS, await begin(source, key))
        await source.call(SourceSide.publish_all, key, NUM_TOKENS)
        result = await destination.result_of(key)
        source.signal(signal.SIGKILL)
        assert result.closing.first_token_id == 7
        destination.free(key)
        await assert_freed(destination)


@pytest.mark.parametrize("num_components", [0, 2])
async def test_a_stopped_source_costs_its_deadline_and_nothing_else(transport: str, num_components: int) -> None:
    settings = settings_of(transport, lease_ms=2_500, fetch_timeout_ms=2_000)
    destination = DestinationSide(settings=settings)
    async with (
        running(destination), source_process(settings=settings) as stopped,
        source_process(settings=settings, worker_id="prefill-1") as other,
    ):
        key = new_key()
        info = await begin(stopped, key, lease_ms=2_500)
        for component in range(num_components):
            await stopped.call(publish, key, component, NUM_TOKENS)
        stopped.signal(signal.SIGSTOP)
        destination.reserve_and_pull(key, NUM_TOKENS, info)
        for _ in range(5):
            await hand_over(other, destination)
        await destination.end_of(key)
        assert key in destination.failed
        await assert_freed(destination)
        assert destination.expired == [key]
        stopped.signal(signal.SIGCONT)
        await hand_over(stopped, destination)  # the same life, awake again
        await stopped.until(pins, (0, 64))


async def test_a_source_stopped_after_closing_delays_nothing(transport: str) -> None:
    """Everything is announced and fetched; the commit waits for nobody."""
    settings = settings_of(transport)
    destination = DestinationSide(settings=settings)
    async with running(destination), source_process(settings=settings) as source:
        key = new_key()
        destination.reserve_and_pull(key, NUM_TOKENS, await begin(source, key))
        await source.call(SourceSide.publish_all, key, NUM_TOKENS)
        await destination.result_of(key)
        source.signal(signal.SIGSTOP)
        destination.free(key)
        await assert_freed(destination)
        source.signal(signal.SIGCONT)
        await source.until(pins, (0, 64))


async def test_same_address_new_life(transport: str) -> None:
    """A worker that restarts on its old address serves again; what was promised in its old life is gone."""
    settings = settings_of(transport)
    destination = DestinationSide(settings=settings)
    async with running(destination):
        key, late = new_key(), new_key()
        async with source_process(settings=settings) as source:
            old = await begin(source, late)
            await hand_over(source, destination)
            port = int((await source.call(listen_on)).rsplit(":", 1)[1])
        async with source_process(settings=settings, port=port) as source:
            info = await begin(source, key)
            assert info.address == old.address
            assert info.epoch != old.epoch
            await destination.channels[old.address].channel_ready()  # it may still wait before it tries again
            destination.reserve_and_pull(late, NUM_TOKENS, old)
            with pytest.raises(Gone):
                await destination.result_of(late)
            for _ in range(2):
                await hand_over(source, destination)
        destination.destination.release(late.journey_id, 1)
        await assert_freed(destination)


async def test_nobody_renews() -> None:
    """A destination that is stopped: the source's pins end with their lease, and no sooner than its deadline."""
    settings = settings_of("shared_memory", lease_ms=1_000)
    async with source_process(settings=settings) as source:
        assert await source.call(begin_and_count, new_key()) == (1, 64 - NUM_BLOCKS)
        await source.until(pins, (0, 64))
        assert await source.call(ends) == ["expired"]


def begin_and_count(side: SourceSide, key: JourneyKey) -> tuple[int, int]:
    side.begin(key, NUM_TOKENS, lease_ms=1_000)
    return pins(side)


async def test_two_destinations_pull_from_one_source(transport: str) -> None:
    settings = settings_of(transport)
    pair = DestinationSide(settings=settings), DestinationSide(settings=settings, worker_id="decode-1")
    async with source_process(settings=settings) as source, running(*pair):
        await asyncio.gather(*(hand_over(source, side, 40) for side in pair))


async def test_errors_are_typed(transport: str) -> None:
    settings = settings_of(transport)
    destination = DestinationSide(settings=settings)
    async with source_process(settings=settings) as source, running(destination):
        key = new_key()
        info = await begin(source, key)
        wrong = SourceInfo(address=info.address, epoch=info.epoch, token="0" * 32)
        destination.reserve_and_pull(key, NUM_TOKENS, wrong)
        with pytest.raises(PdRelayError) as caught:
            await destination.result_of(key)
        assert isinstance(caught.value, Gone)
