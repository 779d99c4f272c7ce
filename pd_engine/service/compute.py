"""A worker's compute thread: everything that touches the model runs in it, so that the event loop never blocks.

Commands go in through a thread-safe inbox and run between two steps; results come back through
`loop.call_soon_threadsafe`. The thread sleeps when it has neither commands nor work.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # how long Python code of a step may keep the event loop waiting; CPython's default is 5 ms

Command = Callable[[], None]


class Core(Protocol):
    """What the thread runs. Made, used and dropped in the thread alone."""

    def step(self) -> bool:
        """Does one step of work; returns False if there was nothing to do."""
        ...


CoreT = TypeVar("CoreT", bound=Core)


CoreT_co = TypeVar("CoreT_co", bound=Core, covariant=True)


class Compute(Protocol[CoreT_co]):
    """Where a core runs: a `ComputeThread`, which has the meaning of each."""

    async def start(self) -> CoreT_co: ...

    def post(self, command: Command) -> None: ...

    def report(self, callback: Callable[..., None], *args: Any) -> None: ...

    async def stop(self) -> None: ...


class ComputeThread(Generic[CoreT]):
    """Owns one `Core`.

    Args:
        name: of the thread.
        build: makes the core; runs in the thread, where a model is loaded and its threads are set.
        on_crash: called in the event loop if a command or a step raised: the core's state is not to be trusted.
    """

    def __init__(
        self, name: str, build: Callable[[Compute[CoreT]], CoreT], on_crash: Callable[[Exception], None]
    ) -> None:
        self._build = build
        self._on_crash = on_crash
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._built: asyncio.Future[CoreT] | None = None
        self._ended = asyncio.Event()

    async def start(self) -> CoreT:
        """Starts the thread and returns its core when that is built; raises what building it raised."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._loop = asyncio.get_running_loop()
        self._built = self._loop.create_future()
        self._thread.start()
        return await self._built

    def post(self, command: Command) -> None:
        """Runs `command` in the thread, before its next step. From any thread."""
        self._inbox.put(command)

    def report(self, callback: Callable[..., None], *args: Any) -> None:
        """Runs `callback(*args)` in the event loop. From the thread; dropped if the loop is closed by then."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.warning("a result came after the event loop was closed")

    async def stop(self) -> None:
        """Lets the step that runs end, and the thread with it. Commands posted before are run. Safe to call twice."""
        if self._loop is None:
            return
        self._inbox.put(None)
        await self._ended.wait()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        assert self._loop is not None and self._built is not None
        try:
            core = self._build(self)
        except Exception as error:  # noqa: BLE001 - handed to the event loop
            self.report(self._built.set_exception, error)
            self.report(self._ended.set)
            return
        self.report(self._built.set_result, core)
        try:
            self._serve(core)
        except Exception as error:
            log.exception("the compute thread has crashed")
            self.report(self._on_crash, error)
        finally:
            self.report(self._ended.set)

    def _serve(self, core: CoreT) -> None:
        idle = False
        while True:
            while idle or not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    return
                command()
                idle = False
            idle = not core.step()
