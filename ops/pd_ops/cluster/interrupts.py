"""Ctrl-C and SIGTERM as something that asyncio code can wait for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")


class Interrupts:
    """`first` is set by the first signal (end, but take your time), `second` by another one (end now).

    Made inside a running event loop of the main thread, whose signal handlers it takes over.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if `event` came first: `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, waiting):
            each.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


class Interruption:
    """Whether a signal has come. Libraries swallow exceptions that are raised under them, so it is kept here too."""

    def __init__(self) -> None:
        self.has_come = False

    def check(self) -> None:
        """Raises:
        KeyboardInterrupt: a signal has come.
        """
        if self.has_come:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """For code outside an event loop: both signals raise KeyboardInterrupt, so that `finally` runs."""
    interruption = Interruption()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interruption.has_come = True
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """For an ending that must be complete, and is bounded: signals are ignored meanwhile."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
