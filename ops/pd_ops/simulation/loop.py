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
    def __init__(self, number: int, loop: VirtualLoop) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number


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
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = 0
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
            while not task.done():
                self._run_once()
            return task.result()
        finally:
            self._is_running = False
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(before)

    def _run_once(self) -> None:
        if not self._ready:
            self._jump()
        handle = self._ready.popleft()
        if handle.cancelled():
            return
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None and not process.is_running:
            process.backlog.append(handle)
            return
        self.num_events += 1
        handle._run()
        self._after_event(process)

    def _jump(self) -> None:
        """To the next timer, and those of the same instant."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise Deadlock(f"nothing is left to happen after {self.now_s:.3f} s")
        self.now_s = max(self.now_s, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self.now_s:
            self._ready.append(heapq.heappop(self._timers)[2])

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
        handle = asyncio.Handle(callback, args, self, context if context is not None else copy_context())
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get()
        return self.call_at_world(when if process is None else process.world_s(when), callback, *args, context=context)

    def call_at_world(
        self, when_s: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """`call_at` by the world's clock."""
        timer = asyncio.TimerHandle(when_s, callback, args, self, context if context is not None else copy_context())
        heapq.heappush(self._timers, (when_s, self._next_number(), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(self._next_number(), self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = NumberedTask(self._next_number(), coro, loop=self, name=name, context=context)
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

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """One that was dropped before its end."""
        self.create_task(generator.aclose())
