"""A process that may have no more threads: what could not begin never runs, and costs its own fetch only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_transfer.threads import run_in_thread
from pd_engine.errors import Unavailable
from support.leaks import assert_nothing_left
from support.transport_cases import TIMEOUT_S, transport_pair


class Threads:
    """Refuses to start those that are made while `are_scarce`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.are_scarce = False
        start = threading.Thread.start

        def start_or_fail(thread: threading.Thread) -> None:
            if self.are_scarce:
                raise RuntimeError("can't start new thread")
            start(thread)

        patch.setattr(threading.Thread, "start", start_or_fail)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


async def test_a_call_that_no_thread_was_there_for_never_runs(threads: Threads) -> None:
    calls: list[str] = []
    with ThreadPoolExecutor(max_workers=1) as executor:
        threads.are_scarce = True
        with pytest.raises(Unavailable, match="no thread for a transfer: can't start new thread"):
            run_in_thread(executor, lambda: calls.append("refused"))
        threads.are_scarce = False
        await run_in_thread(executor, lambda: calls.append("later"))
    assert calls == ["later"]


async def test_what_a_call_raises_is_raised() -> None:
    def fail() -> None:
        raise KeyError("as it likes")

    with ThreadPoolExecutor(max_workers=1) as executor:
        with pytest.raises(KeyError, match="as it likes"):
            await run_in_thread(executor, fail)
        assert await run_in_thread(executor, lambda: 7) == 7


@pytest.mark.parametrize("name", ["shared_memory", "tcp"])
async def test_a_fetch_that_no_thread_was_there_for_writes_nothing_later(name: str, threads: Threads) -> None:
    """Its blocks are somebody else's by then."""
    async with assert_nothing_left(except_files="memfd"), transport_pair(name) as pair:
        connection = await pair.connect()
        threads.are_scarce = True
        with pytest.raises(Unavailable):
            await connection.fetch(pair.spans([(0, 1, 5, 0, 16)]), token=pair.new_token(), timeout_s=TIMEOUT_S)
        threads.are_scarce = False
        await connection.quiesce()
        pair.arena.piece(0, 5)[:] = b"\x5a" * len(pair.arena.piece(0, 5))
        spans = pair.spans([(0, 2, 6, 0, 16)])
        expected = pair.expected(spans)
        await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
        await connection.close()
        assert bytes(pair.arena.buffer) == expected


@pytest.mark.parametrize("name", ["fake nixl", "fake nccl"])
async def test_a_connection_that_no_thread_was_there_for_is_refused(name: str, threads: Threads) -> None:
    async with assert_nothing_left(except_files="memfd"), transport_pair(name) as pair:
        threads.are_scarce = True
        with pytest.raises(Unavailable):
            await pair.connect()
        threads.are_scarce = False
        await (await pair.connect()).close()
