"""Handoffs between real processes that are cancelled, refused or under pressure: nothing leaks or is overwritten."""

from __future__ import annotations

import signal

import pytest

from kv_transfer.journey import JourneyKey
from pd_engine.errors import Gone
from support.fork_server import start_fork_server
from support.handoffs import LAYOUT, DestinationSide, SourceSide, new_key, running
from support.leaks import assert_nothing_left, until
from support.source_calls import (
    NUM_TOKENS,
    PROCESS_TRANSPORTS,
    assert_freed,
    begin,
    hand_over,
    publish,
    release,
    settings_of,
)
from support.source_process import pins, source_process


@pytest.fixture(autouse=True, scope="module")
def fork_server() -> None:
    start_fork_server()


@pytest.fixture(params=PROCESS_TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def test_cancel_then_peer_dies(transport: str) -> None:
    """Cancelled here, then the peer is killed: all is free at once, and a late completion is ignored."""
    settings = settings_of(transport)
    async with assert_nothing_left(except_files="memfd"):
        destination = DestinationSide(settings=settings)
        async with running(destination), source_process(settings=settings) as source:
            key = new_key()
            info = await begin(source, key)
            destination.reserve_and_pull(key, NUM_TOKENS, info)
            await source.call(publish, key, 0, NUM_TOKENS)
            destination.destination.release(key.journey_id, 1)
            source.signal(signal.SIGKILL)
            await assert_freed(destination)
            assert not destination.completed
            assert not destination.failed
            with pytest.raises(Gone):
                destination.reserve_and_pull(key, NUM_TOKENS, info)


async def test_evict_while_sending(transport: str) -> None:
    """The source's pool is under pressure while blocks are fetched: what is pinned stays."""
    settings = settings_of(transport, max_bytes_in_flight=LAYOUT.piece_bytes(0))
    destination = DestinationSide(settings=settings)
    async with source_process(settings=settings) as source, running(destination):
        key, num_tokens = new_key(), 300
        info = await begin(source, key, num_tokens)
        sent = await source.call(SourceSide.contents, key, num_tokens)
        destination.reserve_and_pull(key, num_tokens, info)
        await source.call(SourceSide.publish_all, key, num_tokens)
        while key not in destination.completed:
            assert key not in destination.failed
            await source.call(take_all_and_give_back)
        assert destination.contents(destination.completed[key], num_tokens) == sent
        destination.free(key)
        await source.until(pins, (0, 64))


def take_all_and_give_back(side: SourceSide) -> None:
    """Somebody's request uses every free block."""
    taken = side.pool.allocate(side.pool.num_free, "others")
    for block in taken:
        side.arena.piece(0, block)[:] = bytes(LAYOUT.piece_bytes(0))
    side.pool.release(taken, "others")


async def test_late_data(transport: str) -> None:
    """The source stops in the middle of a handoff, the request is cancelled, another one gets its blocks, the source
    goes on: the other's blocks are untouched."""
    settings = settings_of(transport, max_bytes_in_flight=LAYOUT.piece_bytes(0), lease_ms=60_000)
    destination = DestinationSide(settings=settings)
    async with source_process(settings=settings) as source, running(destination):
        key, num_tokens = new_key(), 900
        destination.reserve_and_pull(key, num_tokens, await begin(source, key, num_tokens))
        await source.call(SourceSide.publish_all, key, num_tokens)
        book = destination.destination._book
        await until(lambda: book.get(key).pieces is not None and book.get(key).pieces.num_verified_bytes > 0)
        source.signal(signal.SIGSTOP)
        assert key not in destination.completed
        destination.destination.release(key.journey_id, key.attempt)
        taken = destination.pool.allocate(destination.pool.num_free, "others")
        places = [(component, block) for component in range(len(LAYOUT.components)) for block in taken]
        for component, block in places:
            destination.arena.piece(component, block)[:] = b"\x5a" * LAYOUT.piece_bytes(component)
        source.signal(signal.SIGCONT)
        await source.call(release, key)
        await until(lambda: destination.destination.num_quarantined == 0)
        for component, block in places:
            assert bytes(destination.arena.piece(component, block)) == b"\x5a" * LAYOUT.piece_bytes(component)
        destination.pool.release(taken, "others")
        await hand_over(source, destination)
        await source.until(pins, (0, 64))
        await assert_freed(destination)


async def test_refused_after_prefill() -> None:
    """Prefill has finished, then the decode side refuses: the router releases, the pins are gone at once."""
    async with source_process() as source:
        key = new_key()
        await begin(source, key)
        await source.call(SourceSide.publish_all, key, NUM_TOKENS)
        await source.call(release, key)
        assert await source.call(pins) == (0, 64)


async def test_cancel_anywhere(transport: str) -> None:
    await cancel_anywhere(transport, 12)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_cancel_anywhere_many_times(transport: str) -> None:
    await cancel_anywhere(transport, 300)


async def cancel_anywhere(transport: str, count: int) -> None:
    """The client leaves when so many bytes have arrived; the next request succeeds and nothing has leaked."""
    settings = settings_of(transport, max_bytes_in_flight=LAYOUT.piece_bytes(0), lease_ms=60_000)
    destination = DestinationSide(settings=settings)
    async with source_process(settings=settings) as source, running(destination):
        for number in range(count):
            key = new_key()
            destination.reserve_and_pull(key, NUM_TOKENS, await begin(source, key))
            await source.call(SourceSide.publish_all, key, NUM_TOKENS)
            enough = number * NUM_TOKENS * LAYOUT.bytes_per_token // count
            await until(lambda key=key, enough=enough: num_arrived(destination, key) >= enough)
            destination.destination.release(key.journey_id, key.attempt)
            await source.call(release, key)
            if key in destination.completed:
                destination.free(key)
            await assert_freed(destination)
            await source.until(pins, (0, 64))
        await hand_over(source, destination)
        await source.until(pins, (0, 64))


def num_arrived(destination: DestinationSide, key: JourneyKey) -> int:
    """Bytes that are verified; all of them once the lease has been handed over."""
    lease = destination.destination._book.get(key)
    if lease is None:
        return NUM_TOKENS * LAYOUT.bytes_per_token
    return 0 if lease.pieces is None else lease.pieces.num_verified_bytes
