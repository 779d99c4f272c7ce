"""Whether anybody still wants a fetch that cannot be cancelled.

Given up, it has `DRAIN_S` to end by itself, without a byte for the arena: that leaves the connection to the others that
use it. Only what has not ended by then is abandoned, and the connection with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

DRAIN_S = 0.5


class Interest:
    """Made and ended in the event loop's thread, looked at from another."""

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self._abandoned = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the bytes may go into the arena."""
        return not self._given_up.is_set()

    @property
    def is_abandoned(self) -> bool:
        """Whether to wait no longer."""
        return self._abandoned.is_set()

    def give_up(self, on_abandoned: Callable[[], None] = lambda: None) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            self._timer = asyncio.get_running_loop().call_later(DRAIN_S, self.abandon, on_abandoned)

    def abandon(self, on_abandoned: Callable[[], None] = lambda: None) -> None:
        self._given_up.set()
        self._abandoned.set()
        on_abandoned()

    def end(self) -> None:
        """The fetch has ended."""
        if self._timer is not None:
            self._timer.cancel()
