"""A port on which each admitted puller has a blocking thread of its own, and how both ends set up and end sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable

from kv_transfer.transport import Authorize
from kv_transfer.transports.listener import Listener
from pd_engine.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10  # a puller that takes nothing for so long is hung up on
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3

ServeStream = Callable[[socket.socket], None]
"""Answers one puller's requests, one after another; returns when the puller hangs up."""


class StreamPort:
    """Args:
    host: the address to listen on.
    name: of the threads.
    """

    def __init__(self, *, secret: str, host: str, name: str) -> None:
        self._secret = secret
        self._host = host
        self._name = name
        self._listener: Listener | None = None
        self._streams: dict[threading.Thread, socket.socket] = {}
        self.port = 0

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def start(self, epoch: str, authorize: Authorize, serve_stream: ServeStream) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.bind((self._host, 0))
        self.port = sock.getsockname()[1]
        self._serve_stream = serve_stream
        self._listener = Listener(
            sock, secret=self._secret, epoch=epoch, authorize=authorize, serve=self._start_stream
        )
        self._listener.start()

    async def stop(self) -> None:
        """Hangs up on all pullers."""
        if self._listener is None:
            return
        await self._listener.stop()
        self._listener = None
        for sock in list(self._streams.values()):
            hang_up(sock)
        for thread in list(self._streams):
            await asyncio.to_thread(thread.join)

    async def _start_stream(self, puller: socket.socket) -> None:
        """Moves the socket to a thread of its own."""
        sock = socket.socket(fileno=puller.detach())
        sock.setblocking(True)
        prepare(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT_S, 0))
        thread = threading.Thread(target=self._run, args=(sock,), name=self._name, daemon=True)
        self._streams[thread] = sock
        thread.start()

    def _run(self, sock: socket.socket) -> None:
        with sock:
            try:
                self._serve_stream(sock)
            except (OSError, Unavailable) as error:
                log.debug("a puller has gone: %s", error)
            except InvalidArgument as error:
                log.warning("hung up on a puller: %s", error.message)
            finally:
                del self._streams[threading.current_thread()]


def prepare(sock: socket.socket) -> None:
    """No delay for small frames; a half-open connection is noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def hang_up(sock: socket.socket) -> None:
    """Wakes a thread that blocks on the socket; the thread closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # already closed by one of the two sides
        return
