"""Accepts pullers on a socket, admits those who know the secret, and hands their sockets on."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from kv_transfer.transport import Authorize
from kv_transfer.transports.handshake import HANDSHAKE_S, admit
from pd_engine.errors import PdRelayError

log = logging.getLogger(__name__)

BACKLOG = 128
MAX_HANDSHAKES = 32  # at a time; for one more the oldest is hung up on, so that idle strangers keep nobody out
MAX_PULLERS = 1024

Serve = Callable[[socket.socket], Awaitable[None]]


class Listener:
    """Owns the listening socket and every accepted one.

    Args:
        sock: bound, not yet listening.
        serve: called with each admitted puller's non-blocking socket; when it returns, the socket is closed.
    """

    def __init__(self, sock: socket.socket, *, secret: str, epoch: str, authorize: Authorize, serve: Serve) -> None:
        self._sock = sock
        self._secret = secret
        self._epoch = epoch
        self._authorize = authorize
        self._serve = serve
        self._handshakes: dict[asyncio.Task[bool], None] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._spawn(self._accept_for_ever())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sock.close()

    async def _accept_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                puller, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # such as too many open files: wait for better times
                log.warning("cannot accept a puller: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) > MAX_PULLERS:
                puller.close()
                continue
            if len(self._handshakes) >= MAX_HANDSHAKES:
                next(iter(self._handshakes)).cancel()
            self._spawn(self._welcome(puller))

    async def _welcome(self, puller: socket.socket) -> None:
        with puller:
            puller.setblocking(False)
            handshake = asyncio.create_task(self._is_admitted(puller))
            self._handshakes[handshake] = None
            try:
                await asyncio.wait([handshake])
            finally:
                handshake.cancel()
                del self._handshakes[handshake]
            if not handshake.cancelled() and handshake.result():
                await self._serve(puller)

    async def _is_admitted(self, puller: socket.socket) -> bool:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await admit(puller, secret=self._secret, epoch=self._epoch, authorize=self._authorize)
        except (PdRelayError, OSError, TimeoutError):
            return False

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("serving a puller failed", exc_info=task.exception())
