"""Calls something again and again, and tells somebody if that breaks: what nobody ticks would never expire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

TICKS_A_LEASE = 20
MAX_TICK_S = 5.0  # holds and tokens live shorter than a long lease

OnCrash = Callable[[Exception], None]


def tick_s(lease_ms: int) -> float:
    """How often what expires is looked for."""
    return min(lease_ms / 1000 / TICKS_A_LEASE, MAX_TICK_S)


def ignore_crash(error: Exception) -> None:
    """It has been logged."""


class Ticker:
    """A task of the event loop.

    Args:
        name: of the task.
        tick: a broken invariant may raise.
        on_crash: `tick` has raised, and will not be called again.
    """

    def __init__(self, name: str, interval_s: float, tick: Callable[[], Awaitable[None]], on_crash: OnCrash) -> None:
        self._name = name
        self._interval_s = interval_s
        self._tick = tick
        self._on_crash = on_crash
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Safe to call twice, and before `start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                await self._tick()
        except Exception as error:
            log.exception("%s: the books of handoffs are broken", self._name)
            self._on_crash(error)
