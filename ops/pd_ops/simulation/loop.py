"""An event loop on a virtual clock: when nothing is ready, time jumps to the next timer.

Everything runs in one order, which depends on nothing but the program: tasks and futures hash by their number, so that
sets of them have an order; work for other threads is done at once.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar, TypeVarTuple

from pd_ops.simulation.process import PROCESS, Process

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(Exception):
    """Nothing is ready and nothing ever will be."""


class NumberedTask(asyncio.Task[Any]):
    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **arguments: Any) -> None:
        self._number = number  # first: it is hashed while it is made
        super().__init__(coroutine, **arguments)
        self._log_destroy_pending = False  # those of killed processes are never finished

    def __hash__(self) -> int:
        return self._number


class NumberedFuture(asyncio.Future[Any]):
    number: int  # given by whoever makes it

    def __hash__(self) -> int:
        return self.number


class Event(asyncio.TimerHandle):
    """A callback that is to run, with less around it than asyncio's own has: there are thousands in a world."""

    __slots__ = ()

    def __init__(
        self, when_s: float, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        self._when = when_s
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context if context is not None else copy_context()
        self._cancelled = False
        self._scheduled = False
        self._repr = None

    def cancel(self) -> None:
        self._cancelled = True


class VirtualLoop(asyncio.AbstractEventLoop):
    """Args:
    after_event: called after each callback, with the process that it was of.
    on_error: told of exceptions that nobody caught, with what was being done and by whom.

    Attributes:
        now_s: the world's time.
        num_events: callbacks that have run.
        tasks: all there have been; kept, so that none is collected at a time of Python's choosing.
    """

    def __init__(
        self,
        after_event: Callable[[Process | None], None],
        on_error: Callable[[Process | None, str, BaseException | None], None],
    ) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.tasks: list[NumberedTask] = []
        self._after_event = after_event
        self._on_error = on_error
        self._ready: deque[Event] = deque()
        self._timers: list[tuple[float, int, Event]] = []
        self._numbers = 0  # of futures, tasks and timers so far
        self._is_running = False

    # Running

    def run_until_complete(self, future: Any) -> Any:
        """Raises: Deadlock: it never completes."""
        before, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        self._is_running = True
        try:
            task = asyncio.ensure_future(future, loop=self)
            self._run_until(task)
            return task.result()
        finally:
            self._is_running = False
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(before)

    def _run_until(self, task: asyncio.Task[Any]) -> None:
        ready, after_event = self._ready, self._after_event
        while not task.done():
            if not ready:
                self._jump()
            event = ready.popleft()
            if event._cancelled:
                continue
            context = event._context
            process = context.get(PROCESS)
            if process is not None and not (process.is_alive and not process.is_stopped):
                process.backlog.append(event)
                continue
            self.num_events += 1
            try:
                context.run(event._callback, *event._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio's own loops do
                self._on_error(process, f"exception in {event._callback}", error)
            after_event(process)

    def _jump(self) -> None:
        """To the next timer, and those of the same instant."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"nothing is left to happen after {self.now_s:.3f} s")
        self.now_s = now_s = max(self.now_s, timers[0][0])
        while timers and timers[0][0] <= now_s:
            self._ready.append(heapq.heappop(timers)[2])

    def go_on(self, process: Process) -> None:
        """A process that did not run runs again: all that it has missed, in order."""
        process.is_alive, process.is_stopped, process.went_on_s = True, False, self.now_s
        self._ready.extend(process.backlog)
        process.backlog.clear()

    # What asyncio asks for

    def time(self) -> float:
        """By the clock of the process that asks."""
        process = PROCESS.get()
        return self.now_s if process is None else process.local_s(self.now_s)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        event = Event(self.now_s, callback, args, self, context)
        self._ready.append(event)
        return event

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process, now_s = PROCESS.get(), self.now_s
        when_s = now_s + delay if process is None else process.world_s(process.local_s(now_s) + delay)
        return self.call_at_world(when_s, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get()
        return self.call_at_world(when if process is None else process.world_s(when), callback, *args, context=context)

    def call_at_world(
        self, when_s: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """`call_at` by the world's clock."""
        timer = Event(when_s, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when_s, self._numbers, timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        future = NumberedFuture(loop=self)
        self._numbers += 1
        future.number = self._numbers
        return future

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._numbers += 1
        task = NumberedTask(self._numbers, coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits it is told
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._on_error(PROCESS.get(), str(context["message"]), context.get("exception"))

    get_debug = staticmethod(bool)  # False, at a tenth of the cost: every task and future asks

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return False

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """One that was dropped before its end."""
        self.create_task(generator.aclose())
