"""What stands in the place of a worker's threads: their work is done in the loop, later, as long as it would take."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from kv_transfer.publisher import Command as PublisherCommand
from kv_transfer.publisher import Publisher
from pd_engine.service.compute import Command, Compute, Core

log = logging.getLogger(__name__)

CoreT = TypeVar("CoreT", bound=Core)


class Pace(Protocol):
    """How long things take, in seconds."""

    def step_s(self) -> float:
        """One step of a core; called when it begins."""

    def hop_s(self) -> float:
        """From one thread to another."""

    def worked_s(self) -> float:
        """In all steps that were noted."""

    def note_step(self) -> None:
        """The step that began last is done."""


class InOrder:
    """Runs callbacks after a hop each, in the order in which they were given."""

    def __init__(self, hop_s: Callable[[], float]) -> None:
        self._hop_s = hop_s
        self._last_s = 0.0

    def run(self, callback: Callable[..., None], *args: Any) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._hop_s())
        loop.call_at(self._last_s, callback, *args)


class LoopCompute(Generic[CoreT]):
    """A compute thread: commands run when a step begins, what the step writes is written when it ends. Meanwhile the
    event loop goes on. Its reports stand in the loop's line at once, before all that comes of the step otherwise."""

    def __init__(
        self, build: Callable[[Compute[CoreT]], CoreT], on_crash: Callable[[Exception], None], pace: Pace
    ) -> None:
        self._build = build
        self._on_crash = on_crash
        self._pace = pace
        self._inbox: deque[Command] = deque()
        self._core: CoreT | None = None
        self._is_idle = True
        self._has_ended = False
        self._stopping: asyncio.Future[None] | None = None

    async def start(self) -> CoreT:
        self._core = self._build(self)
        return self._core

    def post(self, command: Command) -> None:
        self._inbox.append(command)
        if self._is_idle:
            self._is_idle = False
            asyncio.get_running_loop().call_later(self._pace.hop_s(), self._begin)

    def report(self, callback: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(callback, *args)

    async def stop(self) -> None:
        if self._is_idle or self._has_ended:
            self._has_ended = True
        elif self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
            await self._stopping

    def _begin(self) -> None:
        if self._has_ended:
            return
        try:
            while self._inbox:
                self._inbox.popleft()()
        except Exception as error:  # noqa: BLE001 - the thread's boundary
            self._crash(error)
            return
        if self._stopping is not None:
            self._has_ended = True
            self._stopping.set_result(None)
            return
        asyncio.get_running_loop().call_later(self._pace.step_s(), self._end)

    def _end(self) -> None:
        if self._has_ended:
            return
        assert self._core is not None, "not started"
        try:
            is_busy = self._core.step()
        except Exception as error:  # noqa: BLE001 - the thread's boundary
            self._crash(error)
            return
        if is_busy or self._inbox or self._stopping is not None:
            self._begin()
        else:
            self._is_idle = True

    def _crash(self, error: Exception) -> None:
        log.error("the compute thread has crashed", exc_info=error)
        self._has_ended = True
        self._on_crash(error)


def publisher_class(pace: Pace) -> type[Publisher]:
    """A publisher without a thread."""

    class LoopPublisher(Publisher):
        def start(self) -> None:
            self._later = InOrder(pace.hop_s)

        def stop(self) -> None:
            return

        def put(self, command: PublisherCommand) -> None:
            self._later.run(self.do, command)

    return LoopPublisher
