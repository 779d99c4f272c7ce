"""A source of handoffs in a process of its own, for tests that need a real peer to kill or stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from pd_engine.settings import TransferSettings
from support.fork_server import start_fork_server
from support.handoffs import SourceSide

Action = Callable[..., Any]


class SourceProcess:
    """Runs module-level functions `action(side, *args)` in the event loop of the process, one at a time."""

    def __init__(self, **options: Any) -> None:
        context = start_fork_server()
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, options), daemon=True)
        self.process.start()
        child.close()
        self._turn = asyncio.Lock()

    async def call(self, action: Action, *args: Any) -> Any:
        async with self._turn:
            self._pipe.send((action, args))
            return await asyncio.to_thread(self._receive)

    async def until(self, action: Action, expected: Any) -> None:
        """Asks until that is the answer; bounded by the test's own timeout."""
        while await self.call(action) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    async def end(self) -> None:
        self.process.kill()  # one that is dead already, reaped by the fork server, is no error
        await asyncio.to_thread(self.process.join)
        self.process.close()
        self._pipe.close()

    def _receive(self) -> Any:
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value


@asynccontextmanager
async def source_process(**options: Any) -> AsyncIterator[SourceProcess]:
    process = SourceProcess(**options)
    try:
        await process.call(ready)
        yield process
    finally:
        await process.end()


def ready(side: SourceSide) -> None:
    return


def pins(side: SourceSide) -> tuple[int, int]:
    """(pins, free blocks)"""
    return side.source.num_pins, side.pool.num_free


def ends(side: SourceSide) -> list[str]:
    return [reason.value for _, reason in side.ended]


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    asyncio.run(_run(pipe, options))


async def _run(pipe: Connection, options: dict[str, Any]) -> None:
    settings = options.pop("settings", None) or TransferSettings()
    side = SourceSide(settings=settings, **options)
    await side.start()
    while True:
        try:
            action, args = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        try:
            pipe.send((True, action(side, *args)))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            pipe.send((False, error))
    await side.stop()
