"""The nixl transport around its library: what is late never reaches the arena, what is missing is said. With a double
of NIXL's agent; `test_kv_conformance` takes the real one where it is installed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest

from kv_transfer.transport import ChecksumAt, Ending
from kv_transfer.transports.nixl import NixlPull
from kv_transfer.transports.nixl_agent import MODULES, make_nixl_agent
from pd_engine.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from support.fake_nixl import FakeNixlAgent
from support.leaks import assert_nothing_left, until
from support.transport_cases import TIMEOUT_S, Pair, transport_pair


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(FakeNixlAgent, "alive", {})
    monkeypatch.setattr(FakeNixlAgent, "is_stalled", False)
    async with assert_nothing_left(except_files="memfd"), transport_pair("fake nixl") as made:
        yield made


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_late_data(pair: Pair, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is stalled and given up. It goes on later, as nothing can call it back: the arena is not touched."""
    agents: list[FakeNixlAgent] = []
    pull = NixlPull(
        pair.arena, secret="a-secret-of-tests-only", copy=pair.pull._copy,  # type: ignore[attr-defined]
        make_agent=lambda name: agents.append(FakeNixlAgent(name)) or agents[-1],
    )
    connection = await pull.connect(
        pair.source.metadata(), epoch="e" * 32, token=pair.new_token(), num_blocks=24, timeout_s=TIMEOUT_S
    )
    monkeypatch.setattr(FakeNixlAgent, "is_stalled", True)
    spans = pair.spans([(c, block, block, 0, 16) for c in range(3) for block in range(20)])
    before = bytes(pair.arena.buffer)
    fetch = asyncio.create_task(
        connection.fetch(spans, token=pair.new_token(), timeout_s=0.05 if how == "timed out" else TIMEOUT_S)
    )
    await until(lambda: agents[0].transfers != [])
    if how == "cancelled":
        fetch.cancel()
    await asyncio.wait([fetch])
    assert fetch.cancelled() or isinstance(fetch.exception(), DeadlineExceeded)
    await connection.quiesce()
    assert not connection.usable, "its staging memory belongs to the late transfer"
    for transfer in agents[0].transfers:
        assert transfer.num_done < len(transfer.local)
        assert not transfer.is_released
        agents[0].go_on(transfer)
    assert bytes(pair.arena.buffer) == before
    with pytest.raises(Unavailable):
        await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert agents[0].registered, "memory that a transfer may write to is not given back before its agent ends"
    await connection.close()
    monkeypatch.setattr(FakeNixlAgent, "is_stalled", False)
    again = await pair.connect()
    expected = pair.expected(spans)
    await again.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert bytes(pair.arena.buffer) == expected
    await again.close()


async def test_a_stalled_source_holds_up_no_other(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, other = await pair.connect(), await pair.connect()
    spans = pair.spans([(0, 1, 1, 0, 16)])
    monkeypatch.setattr(FakeNixlAgent, "is_stalled", True)
    fetch = asyncio.create_task(stalled.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S))
    reader = stalled._reader  # type: ignore[attr-defined]
    await until(lambda: reader._agent.transfers != [])
    monkeypatch.setattr(reader._agent, "go_on", lambda handle: None)
    monkeypatch.setattr(FakeNixlAgent, "is_stalled", False)
    await other.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    fetch.cancel()
    await asyncio.wait([fetch])
    await stalled.close()
    await other.close()


async def test_generations_are_read_before_and_after_the_bytes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that changes owner while it is read shows it."""
    connection = await pair.connect()
    agent = connection._reader._agent  # type: ignore[attr-defined]
    go_on = agent.go_on

    def move_on(handle: object) -> None:
        if len(agent.transfers) == 2:  # the bytes
            pair.source_arena.renew(4)
        go_on(handle)

    monkeypatch.setattr(agent, "go_on", move_on)
    fetched = await connection.fetch(
        pair.spans([(0, 3, 1, 0, 16), (0, 4, 2, 0, 16)]), token=pair.new_token(), timeout_s=TIMEOUT_S
    )
    assert len(agent.transfers) == 3
    assert (fetched.generations_after - fetched.generations_before).tolist() == [0, 1]
    await connection.close()


def test_what_it_declares() -> None:
    assert NixlPull.capabilities.ending is Ending.STAGING
    assert NixlPull.capabilities.one_sided
    assert NixlPull.capabilities.checksum_at is ChecksumAt.COPY


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'pd-relay\[nixl\]'"):
        make_nixl_agent("a")
