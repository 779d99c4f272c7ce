"""From a worker's cache events to where requests go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import FailedPrecondition, PdRelayError, Unavailable
from pd_engine.hashing import block_hashes
from pd_router import cache_feed
from pd_router.cache_feed import follow_cache
from pd_router.prefix_index import PrefixIndex
from support.router_lab import RouterLab, eventually, router_lab

PROMPT = list(range(100, 100 + 16 * 6 + 3))
HASHES = block_hashes(PROMPT, fingerprint="ab" * 16)


@pytest.fixture
async def lab() -> AsyncIterator[RouterLab]:
    async with router_lab(num_prefill=2, num_decode=2) as lab:
        yield lab


def held(lab: RouterLab) -> dict[str, int]:
    return lab.router.prefix_index.held(HASHES)


async def served_by(lab: RouterLab) -> tuple[str, str]:
    """Who prefills and who decodes the prompt now."""
    await lab.until_reported_idle()
    lab.forget()
    complete = await lab.generate(PROMPT, max_tokens=2)
    return complete.handoff.prefill_worker, complete.handoff.decode_worker


async def test_requests_go_where_their_prefix_is_cached(lab: RouterLab) -> None:
    assert await served_by(lab) == ("prefill-0", "decode-0")
    lab.prefill[1].tell_cache(stored=HASHES[:4])
    lab.decode[1].tell_cache(stored=HASHES[:2])
    await eventually(lambda: held(lab) == {"prefill-1": 4, "decode-1": 2})
    assert await served_by(lab) == ("prefill-1", "decode-1")
    lab.prefill[0].tell_cache(stored=HASHES)
    lab.decode[1].tell_cache(removed=HASHES[:2])
    await eventually(lambda: held(lab) == {"prefill-0": 6, "prefill-1": 4})
    assert await served_by(lab) == ("prefill-0", "decode-0")


async def test_a_cached_prefix_draws_requests_until_its_queue_costs_more(lab: RouterLab) -> None:
    """More than to fetch the prefix to the other worker, at first; then the other one's queue counts too."""
    lab.prefill[1].tell_cache(stored=HASHES[:4])  # 35 of 99 tokens are left to compute
    await eventually(lambda: held(lab) == {"prefill-1": 4})
    gate = asyncio.Event()
    places = []
    running = []
    for stub in lab.prefill:
        stub.faults.prefill_gate = gate
    for number in range(4):
        running.append(asyncio.create_task(lab.generate(PROMPT, max_tokens=2)))
        await eventually(lambda: sum(len(stub.pins) for stub in lab.prefill) == number + 1)  # noqa: B023
        places.append([len(stub.pins) for stub in lab.prefill])
    gate.set()
    await asyncio.gather(*running)
    assert places == [[0, 1], [1, 1], [1, 2], [1, 3]]


async def test_workers_are_told_the_hashes_by_which_they_were_chosen(lab: RouterLab) -> None:
    await lab.generate(PROMPT, max_tokens=2)
    [reserve] = [request for stub in lab.decode for request in stub.requests if isinstance(request, pb.ReserveRequest)]
    assert list(reserve.block_hashes) == HASHES


async def test_a_request_that_bypasses_caches_is_placed_without_regard_to_them(lab: RouterLab) -> None:
    lab.prefill[1].tell_cache(stored=HASHES)
    await eventually(lambda: held(lab) == {"prefill-1": 6})
    request = lab.request(PROMPT, max_tokens=2)
    request.placement.bypass_prefix_cache = True
    assert (await lab.complete(request)).handoff.prefill_worker == "prefill-0"
    salted = lab.request(PROMPT, max_tokens=2, cache_salt="another tenant")
    assert (await lab.complete(salted)).handoff.prefill_worker == "prefill-0"


async def test_a_lost_message_is_made_good_by_a_snapshot(lab: RouterLab) -> None:
    worker = lab.prefill[1]
    worker.tell_cache(stored=HASHES[:1])
    await eventually(lambda: held(lab) == {"prefill-1": 1})
    worker.tell_cache(stored=HASHES[1:3], lost=True)
    worker.tell_cache(stored=HASHES[3:4])
    await eventually(lambda: held(lab) == {"prefill-1": 4})
    assert worker.cache_readers == [0, 0]


async def test_a_worker_that_begins_another_life_has_nothing(lab: RouterLab) -> None:
    worker = lab.prefill[1]
    worker.tell_cache(stored=HASHES)
    await eventually(lambda: held(lab) == {"prefill-1": 6})
    await worker.kill()
    await worker.start()
    await eventually(lambda: held(lab) == {})
    worker.tell_cache(stored=HASHES[:2])
    await eventually(lambda: held(lab) == {"prefill-1": 2})


async def test_a_worker_that_was_removed_leaves_the_index(lab: RouterLab) -> None:
    lab.prefill[1].tell_cache(stored=HASHES)
    await eventually(lambda: held(lab) == {"prefill-1": 6})
    gone = lab.prefill.pop()
    await lab.tell_workers()
    assert lab.router.prefix_index.num_entries == 0
    await gone.kill()


async def test_a_worker_without_events_serves_without_an_index(lab: RouterLab) -> None:
    worker = lab.prefill[1]
    worker.tell_cache(stored=HASHES)
    await eventually(lambda: held(lab) == {"prefill-1": 6})
    assert worker.cache_queue is not None
    worker.cache_queue.put_nowait(FailedPrecondition("this worker tells no more"))
    await eventually(lambda: held(lab) == {})
    assert await served_by(lab) == ("prefill-0", "decode-0")
    request = lab.request(PROMPT, max_tokens=2)
    request.placement.prefill_worker = "prefill-1"
    assert (await lab.complete(request)).handoff.prefill_worker == "prefill-1"


def batch(sequence: int, *, previous: int, stored: Sequence[bytes] = (), snapshot: bool = False) -> pb.CacheEventBatch:
    return pb.CacheEventBatch(
        epoch="e", sequence=sequence, previous_sequence=previous, stored=stored, snapshot=snapshot
    )


class Streams:
    """Plays one scripted stream a subscription; an error in it is raised, after the last one it stays silent."""

    def __init__(self, *scripts: Sequence[pb.CacheEventBatch | PdRelayError]) -> None:
        self.asked: list[int] = []
        self.drained = asyncio.Event()
        self._scripts = list(scripts)

    async def subscribe(self, from_sequence: int) -> AsyncGenerator[pb.CacheEventBatch, None]:
        self.asked.append(from_sequence)
        try:
            for item in self._scripts.pop(0):
                if isinstance(item, PdRelayError):
                    raise item
                yield item
            if not self._scripts:
                self.drained.set()
            await asyncio.Event().wait()
        finally:
            if not self._scripts:
                self.drained.set()


async def follow(index: PrefixIndex, streams: Streams) -> None:
    """Until all was played and taken in."""
    task = asyncio.create_task(follow_cache(index, "w", "e", streams.subscribe))
    async with asyncio.timeout(60):
        await streams.drained.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_broken_stream_is_resumed_after_what_was_seen() -> None:
    index = PrefixIndex(max_entries=100)
    first = Streams([batch(5, previous=0, stored=HASHES[:2], snapshot=True), Unavailable("cut")])
    with pytest.raises(Unavailable, match="cut"):
        await follow_cache(index, "w", "e", first.subscribe)
    second = Streams([batch(6, previous=5, stored=HASHES[2:3])])
    await follow(index, second)
    assert (first.asked, second.asked) == ([0], [5])
    assert index.held(HASHES) == {"w": 3}


async def test_a_snapshot_in_parts_that_breaks_off_is_taken_anew() -> None:
    index = PrefixIndex(max_entries=100)
    first = Streams([batch(0, previous=0, stored=HASHES[:2], snapshot=True), Unavailable("cut")])
    with pytest.raises(Unavailable, match="cut"):
        await follow_cache(index, "w", "e", first.subscribe)
    assert index.held(HASHES) == {"w": 2}
    second = Streams(
        [batch(0, previous=0, stored=HASHES[:2], snapshot=True), batch(9, previous=0, stored=HASHES[2:5])]
    )
    await follow(index, second)
    assert second.asked == [0]
    assert index.held(HASHES) == {"w": 5}
    assert index.resume("w", "e") == 9


async def test_after_a_gap_the_stream_is_asked_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "GAP_PAUSE_S", 0.0)
    index = PrefixIndex(max_entries=100)
    streams = Streams(
        [batch(2, previous=0, stored=HASHES[:1], snapshot=True), batch(9, previous=7, stored=HASHES[:3])],
        [batch(9, previous=0, stored=HASHES[:3], snapshot=True)],
    )
    await follow(index, streams)
    assert streams.asked == [0, 0]
    assert index.held(HASHES) == {"w": 3}


@pytest.mark.parametrize("script", [
    [batch(2, previous=0, stored=HASHES, snapshot=True), FailedPrecondition("CacheEvents is not implemented")],
    [batch(2, previous=0, stored=HASHES, snapshot=True), batch(3, previous=2, stored=[b"no hash"])],
])
async def test_a_worker_with_broken_events_has_no_index(
    script: list[pb.CacheEventBatch | PdRelayError], caplog: pytest.LogCaptureFixture
) -> None:
    index = PrefixIndex(max_entries=100)
    await follow(index, Streams(script))
    assert index.num_entries == 0
    assert "worker w is placed without regard to its cache" in caplog.text
