"""The compute thread: commands between steps, results in the loop, sleep without work, ends and crashes."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

import pytest

from pd_engine.service.compute import ComputeThread


class Counter:
    """A core that works off numbers and reports each with the thread it ran in."""

    def __init__(self, thread: ComputeThread[Counter], results: asyncio.Queue[tuple[int, str]]) -> None:
        self._thread = thread
        self._results = results
        self.todo: deque[int] = deque()
        self.num_idle_steps = 0

    def step(self) -> bool:
        if not self.todo:
            self.num_idle_steps += 1
            return False
        number = self.todo.popleft()
        if number < 0:
            raise ZeroDivisionError(number)
        self._thread.report(self._results.put_nowait, (number, threading.current_thread().name))
        return True


async def started(
    results: asyncio.Queue[tuple[int, str]], on_crash: Callable[[Exception], None]
) -> tuple[ComputeThread[Counter], Counter]:
    thread = ComputeThread("compute-test", lambda thread: Counter(thread, results), on_crash)
    return thread, await thread.start()


async def test_work_posted_while_it_sleeps_is_done_in_the_thread() -> None:
    results: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    thread, core = await started(results, print)
    for number in range(5):
        thread.post(lambda number=number: core.todo.append(number))
        assert await results.get() == (number, "compute-test")
    await thread.stop()
    assert core.num_idle_steps <= 6  # it slept between: at most one look for work a command, and one at the start


async def test_commands_run_between_two_steps() -> None:
    results: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    thread, core = await started(results, print)
    seen: list[int] = []

    def add_many() -> None:
        core.todo.extend(range(1_000))
        thread.post(lambda: seen.append(len(core.todo)))

    thread.post(add_many)
    await results.get()
    await thread.stop()
    assert seen
    assert 1_000 - seen[0] <= 1


async def test_stop_runs_what_was_posted_before_it_and_may_be_called_twice() -> None:
    thread, _ = await started(asyncio.Queue(), print)
    ran: list[int] = []
    for number in range(10):
        thread.post(lambda number=number: ran.append(number))
    await thread.stop()
    await thread.stop()
    assert ran == list(range(10))


async def test_a_thread_that_was_never_started_stops() -> None:
    await ComputeThread("never", lambda thread: Counter(thread, asyncio.Queue()), lambda error: None).stop()


async def test_what_building_raises_is_raised_by_start() -> None:
    def build(thread: ComputeThread[Counter]) -> Counter:
        raise FileNotFoundError("no model")

    thread = ComputeThread("broken", build, lambda error: None)
    with pytest.raises(FileNotFoundError, match="no model"):
        await thread.start()
    await thread.stop()


@pytest.mark.parametrize("where", ["step", "command"])
async def test_a_crash_is_told_in_the_loop(where: str) -> None:
    crashes: asyncio.Queue[Exception] = asyncio.Queue()
    thread, core = await started(asyncio.Queue(), crashes.put_nowait)
    if where == "step":
        thread.post(lambda: core.todo.append(-1))
    else:
        thread.post(lambda: core.todo.remove(7))
    assert type(await crashes.get()) is (ZeroDivisionError if where == "step" else ValueError)
    await thread.stop()


async def test_the_loop_goes_on_while_the_thread_computes() -> None:
    results: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    thread, core = await started(results, print)
    gate = threading.Event()
    thread.post(gate.wait)  # a long step
    thread.post(lambda: core.todo.append(1))
    turns = 0
    while turns < 100:
        await asyncio.sleep(0)
        turns += 1
    assert results.empty()
    gate.set()
    assert (await results.get())[0] == 1
    await thread.stop()
