"""The end of a connection, which comes also when whoever closes it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class Closing:
    """Args:
    end: releases what the connection has; called once.
    """

    def __init__(self, end: Callable[[], Coroutine[None, None, None]]) -> None:
        self._end = end
        self._task: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Begins the end if nobody has, and returns when it has come. Cancelled, it goes on without its caller."""
        if self._task is None:
            self._task = asyncio.create_task(self._end(), name="kv-closing")
        await asyncio.shield(self._task)
