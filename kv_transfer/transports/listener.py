"""Accepts pullers on a socket, admits those who know the secret, and hands their sockets on.

Strangers are cheap, however many come: a turn of the event loop accepts a few, and hangs up at once on those who have
gone again or speak before they are spoken to. At most `MAX_HANDSHAKES` of the others have a handshake at a time. One
more takes the place of the oldest if that one has had `PATIENCE_S`; if not it is hung up on, and a puller comes again
(`handshake.connect`). So pullers get in beside strangers that say nothing, and beside strangers that come in crowds.

Admitted pullers may stay when their token has ended, but there is a limit to those with one token, and one to all; for
one more, one of them goes (`crowd`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from kv_transfer.transport import Authorize
from kv_transfer.transports.crowd import MAX_A_TOKEN, first_to_go
from kv_transfer.transports.handshake import HANDSHAKE_S, admit
from kv_transfer.transports.watch import is_silent
from pd_engine.errors import PdRelayError

log = logging.getLogger(__name__)

BACKLOG = 512
ACCEPTS_A_TURN = 16
MAX_HANDSHAKES = 32
PATIENCE_S = 0.2
MAX_PULLERS = 1024
PAUSE_S = 0.1  # after a failure to accept, such as too many open files

Serve = Callable[[socket.socket, str], Awaitable[None]]


class Listener:
    """Owns the listening socket and every accepted one.

    Args:
        sock: bound, not yet listening.
        serve: called with each admitted puller's non-blocking socket, and the token that it has shown; when it returns,
            the socket is closed.
    """

    def __init__(self, sock: socket.socket, *, secret: str, epoch: str, authorize: Authorize, serve: Serve) -> None:
        self._sock = sock
        self._secret = secret
        self._epoch = epoch
        self._authorize = authorize
        self._serve = serve
        self._pullers: dict[asyncio.Task[None], socket.socket] = {}
        self._tokens: dict[asyncio.Task[None], str] = {}  # of those that are served; oldest first
        self._handshakes: dict[asyncio.Task[None], float] = {}  # of those: since when; oldest first
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)
        self._listen()

    async def stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        for task in self._pullers:
            task.cancel()
        await asyncio.gather(*self._pullers, return_exceptions=True)

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._sock, self._accept_some)

    def _accept_some(self) -> None:
        """Called in every turn in which somebody waits to be accepted."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                puller, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("cannot accept a puller: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._sock)
                self._pause = loop.call_later(PAUSE_S, self._listen)
                return
            if is_silent(puller) and self._has_place():
                self._welcome(puller)
            else:
                puller.close()

    def _has_place(self) -> bool:
        """For one more handshake; the oldest one may have to go."""
        if len(self._handshakes) >= MAX_HANDSHAKES:
            oldest, began_s = next(iter(self._handshakes.items()))
            if asyncio.get_running_loop().time() < began_s + PATIENCE_S:
                return False
            del self._handshakes[oldest]
            oldest.cancel()
        return True

    def _welcome(self, puller: socket.socket) -> None:
        puller.setblocking(False)
        task = asyncio.create_task(self._attend_to(puller))
        self._pullers[task] = puller
        self._handshakes[task] = asyncio.get_running_loop().time()
        task.add_done_callback(self._ended)

    async def _attend_to(self, puller: socket.socket) -> None:
        token = await self._admitted(puller)
        task = asyncio.current_task()
        assert task is not None
        self._handshakes.pop(task, None)
        if token is not None:
            self._make_room(token)
            self._tokens[task] = token
            await self._serve(puller, token)

    def _make_room(self, token: str) -> None:
        """For one more puller with that token."""
        same = [task for task, shown in self._tokens.items() if shown == token]
        if len(same) >= MAX_A_TOKEN:
            leaving = same[0]
        elif len(self._tokens) >= MAX_PULLERS:
            leaving = first_to_go(self._tokens, self._authorize)
        else:
            return
        log.info("too many pullers: hung up on one")
        del self._tokens[leaving]
        leaving.cancel()

    async def _admitted(self, puller: socket.socket) -> str | None:
        """The token that it has shown; None: it is a stranger."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await admit(puller, secret=self._secret, epoch=self._epoch, authorize=self._authorize)
        except (PdRelayError, OSError):
            return None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._pullers.pop(task).close()
        self._handshakes.pop(task, None)
        self._tokens.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ConnectionError):
            log.debug("a puller has gone: %s", error)
        elif isinstance(error, OSError):
            log.warning("a puller cannot be served: %s", error)
        elif error is not None:
            log.error("serving a puller failed", exc_info=error)
