"""The source's half of the tcp transport: one blocking thread a stream, bytes sent straight from the arena."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Sequence

import numpy as np

from kv_transfer.transport import Authorize, Int64s, Metadata
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.tcp_frames import (
    MAX_RANGES,
    RANGE,
    REPLY,
    REQUEST,
    Ranges,
    Status,
    check_ranges,
)
from pd_engine.cache.arena import Arena
from pd_engine.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)

NAME = "tcp"
MAX_VIEWS = 512  # of one sendmsg; the kernel's limit is 1,024
SEND_TIMEOUT_S = 10  # a puller that takes nothing for so long is hung up on
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3


class TcpSource:
    """Serves the arena on a port of its own.

    Args:
        host: the address to listen on; also what pullers are told, unless it is a wildcard.
        public_host: what pullers are told instead.
    """

    name = NAME

    def __init__(self, *, secret: str, host: str, public_host: str | None = None) -> None:
        self._secret = secret
        self._host = host
        self._public_host = public_host or host
        self._port = 0
        self._listener: Listener | None = None
        self._streams: dict[threading.Thread, socket.socket] = {}

    async def start(self, arena: Arena, epoch: str, authorize: Authorize) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.bind((self._host, 0))
        self._port = sock.getsockname()[1]
        self._serve_stream = _StreamServer(arena, authorize)
        self._listener = Listener(
            sock, secret=self._secret, epoch=epoch, authorize=authorize, serve=self._start_stream
        )
        self._listener.start()

    def metadata(self) -> Metadata:
        return {"host": self._public_host, "port": self._port}

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
        thread = threading.Thread(target=self._run, args=(sock,), name="kv-tcp-source", daemon=True)
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


class _StreamServer:
    """Answers the requests of one stream after another call: `server(sock)` returns when the puller hangs up."""

    def __init__(self, arena: Arena, authorize: Authorize) -> None:
        self._arena = arena
        self._authorize = authorize

    def __call__(self, sock: socket.socket) -> None:
        header = bytearray(REQUEST.size)
        while receive_into(sock, [memoryview(header)], may_end=True):
            number, token, count = REQUEST.unpack(header)
            if not 1 <= count <= MAX_RANGES:
                raise InvalidArgument(f"tcp: a request has 1 to {MAX_RANGES} ranges, got {count}")
            packed = bytearray(count * RANGE.itemsize)
            receive_into(sock, [memoryview(packed)])
            self._answer(sock, number, token.decode("ascii", errors="replace"), np.frombuffer(packed, dtype=RANGE))

    def _answer(self, sock: socket.socket, number: int, token: str, ranges: Ranges) -> None:
        check_ranges(ranges, self._arena)
        allowed = self._authorize(token)
        if allowed is None or not allowed.issuperset(ranges["block"].tolist()):
            sock.sendall(REPLY.pack(number, Status.GONE))
            return
        before = self._arena.generations[ranges["block"]]
        sock.sendall(REPLY.pack(number, Status.OK) + before.tobytes())
        for start in range(0, len(ranges), MAX_VIEWS):  # views are made while earlier ones travel
            part = ranges[start : start + MAX_VIEWS]
            send_views(sock, views_of(self._arena.buffer, part["offset"], part["length"]))
        sock.sendall(self._arena.generations[ranges["block"]].tobytes())


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
