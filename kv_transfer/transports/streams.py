"""A port on which each admitted puller has a blocking thread of its own, and what both ends do with sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from kv_transfer.transport import Authorize, Int64s
from kv_transfer.transports.listener import Listener
from pd_engine.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)

MAX_VIEWS = 512  # of one sendmsg; the kernel's limit is 1,024
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


def views_of(buffer: memoryview, offsets: Int64s, lengths: Int64s) -> list[memoryview]:
    """Of ranges of a buffer."""
    ends = (offsets + lengths).tolist()
    return [buffer[start:end] for start, end in zip(offsets.tolist(), ends, strict=True)]


def send_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Sends all bytes of all views on a blocking socket."""
    start = 0
    while start < len(views):
        group = views[start : start + MAX_VIEWS]
        sent = sock.sendmsg(group)
        for view in group:
            if sent < view.nbytes:
                sock.sendall(view[sent:])  # the kernel took part of the group: finish this view, go on after it
                start += 1
                break
            sent -= view.nbytes
            start += 1


def receive_into(sock: socket.socket, views: Sequence[memoryview], *, may_end: bool = False) -> bool:
    """Fills all views on a blocking socket. False: the peer has hung up before the first byte, and `may_end`.

    Raises:
        Unavailable: the peer has hung up before the last byte.
    """
    start, is_first = 0, True
    while start < len(views):
        group = list(views[start : start + MAX_VIEWS])
        num_bytes = sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
        if num_bytes == 0:
            if is_first and may_end:
                return False
            raise Unavailable("the peer hung up")
        is_first = False
        for view in group:
            if num_bytes < view.nbytes:
                if num_bytes:
                    _receive_rest(sock, view[num_bytes:])
                    start += 1
                break
            num_bytes -= view.nbytes
            start += 1
    return True


def _receive_rest(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        num_bytes = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if num_bytes == 0:
            raise Unavailable("the peer hung up")
        view = view[num_bytes:]
