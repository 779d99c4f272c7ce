"""The nccl transport around its library, with a double of it: pairs that stall, that are lost, that are too many."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports import fetches, interest, nccl_source
from kv_transfer.transports.interest import Interest
from kv_transfer.transports.nccl_messages import messages_of
from kv_transfer.transports.nccl_pair import load_nccl
from pd_engine.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from support.fake_nccl import FakeNccl
from support.leaks import assert_nothing_left, until
from support.transport_cases import TIMEOUT_S, Pair, transport_pair

LONG_S = 1_000.0


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(FakeNccl, "shared", FakeNccl())
    async with assert_nothing_left(except_files="memfd"):
        async with transport_pair("fake nccl") as made:
            yield made
        assert all(end.is_aborted for end in FakeNccl.shared.pairs), "each pair costs device memory"


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_a_stalled_pair_ends_alone_and_writes_nothing(pair: Pair, how: str) -> None:
    stalled, other = await pair.connect(), await pair.connect()
    spans = pair.spans([(c, block, block, 0, 16) for c in range(3) for block in range(20)])
    before = bytes(pair.arena.buffer)
    end = stalled._pair  # type: ignore[attr-defined]
    FakeNccl.shared.is_stalled = True
    fetch = asyncio.create_task(
        stalled.fetch(spans, token=pair.new_token(), timeout_s=0.05 if how == "timed out" else TIMEOUT_S)
    )
    await until(lambda: end.wanted_bytes is not None)
    if how == "cancelled":
        fetch.cancel()
    await asyncio.wait([fetch])
    assert fetch.cancelled() or isinstance(fetch.exception(), DeadlineExceeded)
    await stalled.quiesce()
    assert not stalled.usable
    assert end.is_aborted
    FakeNccl.shared.is_stalled = False
    assert bytes(pair.arena.buffer) == before
    expected = pair.expected(spans)
    await other.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert bytes(pair.arena.buffer) == expected
    await stalled.close()
    await other.close()


async def test_a_cancelled_fetch_that_ends_soon_keeps_the_pair(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interest, "DRAIN_S", LONG_S)  # soon, however busy the machine is
    timers = []

    class Watched(Interest):
        def end(self) -> None:
            super().end()
            timers.append(self._timer)

    monkeypatch.setattr(fetches, "Interest", Watched)
    connection = await pair.connect()
    spans = pair.spans([(c, block, block, 0, 16) for c in range(3) for block in range(20)])
    before = bytes(pair.arena.buffer)
    end = connection._pair  # type: ignore[attr-defined]
    FakeNccl.shared.is_stalled = True
    fetch = asyncio.create_task(connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S))
    await until(lambda: end.wanted_bytes is not None)
    fetch.cancel()
    await asyncio.wait([fetch])
    FakeNccl.shared.is_stalled = False
    await connection.quiesce()
    assert bytes(pair.arena.buffer) == before, "what nobody wants does not reach the arena"
    assert connection.usable
    [timer] = timers
    assert timer is not None and timer.cancelled(), "it would abandon the pair later"
    expected = pair.expected(spans)
    await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert bytes(pair.arena.buffer) == expected
    await connection.close()


async def test_a_lost_peer_is_unavailable(pair: Pair) -> None:
    connection = await pair.connect()
    connection._pair.is_lost = True  # type: ignore[attr-defined]
    with pytest.raises(Unavailable):
        await connection.fetch(pair.spans([(0, 1, 1, 0, 16)]), token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert not connection.usable
    await connection.close()


async def test_a_source_has_a_bounded_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNccl, "shared", FakeNccl())
    monkeypatch.setattr(nccl_source, "MAX_PAIRS", 2)
    async with transport_pair("fake nccl") as pair:
        first, second = await pair.connect(), await pair.connect()
        with pytest.raises(Unavailable, match="as many NCCL pairs as it can"):
            await pair.connect()
        await first.close()
        await until(lambda: pair.source._port.num_streams == 1)  # type: ignore[attr-defined]
        await (await pair.connect()).close()
        await second.close()


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), size=st.integers(1, 50), data=st.data())
def test_messages_hold_every_byte_once_in_order(lengths: list[int], size: int, data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.integers(0, 1000), min_size=len(lengths), max_size=len(lengths)))
    messages = messages_of(np.array(starts), np.array(lengths), size)
    places: list[int] = []
    for message in messages[:-1]:
        assert message.num_bytes == size
    for message in messages:
        filled = 0
        for start, offset, length in zip(
            message.arena_offsets.tolist(), message.offsets.tolist(), message.lengths.tolist(), strict=True
        ):
            assert offset == filled and length > 0
            filled += length
            places += range(start, start + length)
    assert places == [place for start, length in zip(starts, lengths, strict=True)
                      for place in range(start, start + length)]


def test_without_the_extra_or_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'pd-relay\[gpu\]'"):
        load_nccl()


async def test_one_token_does_not_take_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNccl, "shared", FakeNccl())
    monkeypatch.setattr(nccl_source, "MAX_PAIRS", 3)
    async with transport_pair("fake nccl") as pair:
        greedy = pair.new_token()
        connections = [await pair.connect(greedy) for _ in range(nccl_source.MAX_PAIRS_A_TOKEN)]
        with pytest.raises(Unavailable, match="as many NCCL pairs as it can"):
            await pair.connect(greedy)
        connections.append(await pair.connect())
        for connection in connections:
            await connection.close()


async def test_a_pair_whose_token_has_ended_goes_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNccl, "shared", FakeNccl())
    monkeypatch.setattr(nccl_source, "MAX_PAIRS", 2)
    monkeypatch.setattr(nccl_source, "EVICTION_S", 60.0)
    async with transport_pair("fake nccl") as pair:
        tokens = [pair.new_token() for _ in range(2)]
        connections = [await pair.connect(token) for token in tokens]
        del pair.allowed[tokens[0]]
        connections.append(await pair.connect())
        spans = pair.spans([(0, 1, 1, 0, 16)])
        expected = pair.expected(spans)
        await connections[1].fetch(spans, token=tokens[1], timeout_s=TIMEOUT_S)
        assert bytes(pair.arena.buffer) == expected, "the one whose token lives has stayed"
        for connection in connections:
            await connection.close()
