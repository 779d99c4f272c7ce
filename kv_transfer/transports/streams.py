"""A port on which each admitted puller has a blocking thread of its own, and how both ends set up and end sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

from kv_transfer.ticker import Ticker, ignore_crash
from kv_transfer.transport import Authorize
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.stream_book import Stream, crowded_out
from pd_engine.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10  # a puller that takes nothing for so long is hung up on
LOOK_PERIOD_S = 1.0  # between two looks for streams that have lasted too long
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3

ServeStream = Callable[[Stream], None]
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
        self._ticker = Ticker(f"{name}-streams", LOOK_PERIOD_S, self._cut_overdue, ignore_crash)
        self._streams: dict[Stream, threading.Thread] = {}
        self.port = 0

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def start(self, epoch: str, authorize: Authorize, serve_stream: ServeStream) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.bind((self._host, 0))
        self.port = sock.getsockname()[1]
        self._authorize = authorize
        self._serve_stream = serve_stream
        self._listener = Listener(
            sock, secret=self._secret, epoch=epoch, authorize=authorize, serve=self._start_stream
        )
        self._listener.start()
        self._ticker.start()

    async def stop(self) -> None:
        """Hangs up on all pullers."""
        if self._listener is None:
            return
        await self._ticker.stop()
        await self._listener.stop()
        self._listener = None
        for stream in list(self._streams):
            hang_up(stream.sock)
        for thread in list(self._streams.values()):
            await asyncio.to_thread(thread.join)

    async def _start_stream(self, puller: socket.socket, token: str) -> None:
        """Moves the socket to a thread of its own, if there is room for one more."""
        stream = Stream(puller, token, time.monotonic)
        leaving = crowded_out(stream, list(self._streams), self._authorize)
        if leaving is not None:
            log.info("too many streams of pullers: hung up on one")
            leaving.cut()
        if leaving is stream:
            return
        stream.sock = socket.socket(fileno=puller.detach())
        stream.sock.setblocking(True)
        prepare(stream.sock)
        stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT_S, 0))
        thread = threading.Thread(target=self._run, args=(stream,), name=self._name, daemon=True)
        self._streams[stream] = thread
        try:
            thread.start()
        except RuntimeError as error:  # this process may have no more of them
            log.warning("hung up on a puller: %s", error)
            del self._streams[stream]
            stream.sock.close()

    def _run(self, stream: Stream) -> None:
        with stream.sock:
            try:
                self._serve_stream(stream)
            except (OSError, Unavailable) as error:
                log.debug("a puller has gone: %s", error)
            except InvalidArgument as error:
                log.warning("hung up on a puller: %s", error.message)
            finally:
                del self._streams[stream]

    async def _cut_overdue(self) -> None:
        now_s = time.monotonic()
        for stream in list(self._streams):
            if not stream.is_cut and stream.is_overdue(now_s, self._authorize):
                log.info("hung up on a puller that has kept its stream for too long")
                stream.cut()


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
