"""The source's half of the tcp transport: bytes are sent straight from the arena."""

from __future__ import annotations

import numpy as np

from kv_transfer.transport import Authorize, Metadata
from kv_transfer.transports.stream_book import Phase, Stream
from kv_transfer.transports.streams import StreamPort
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
from pd_engine.errors import InvalidArgument
from pd_kernels.block_stream import send_pieces
from pd_kernels.block_stream.reference import receive_views

NAME = "tcp"


class TcpSource:
    """Serves the arena on a port of its own.

    Args:
        host: the IP address to listen on; also what pullers are told, unless it is a wildcard.
        public_host: what pullers are told instead, an IP address: they look up no names.
    """

    name = NAME

    def __init__(self, *, secret: str, host: str, public_host: str | None = None) -> None:
        self._public_host = public_host or host
        self._port = StreamPort(secret=secret, host=host, name="kv-tcp-source")

    async def start(self, arena: Arena, epoch: str, authorize: Authorize) -> None:
        self._port.start(epoch, authorize, _StreamServer(arena, authorize))

    def metadata(self) -> Metadata:
        return {"host": self._public_host, "port": self._port.port}

    async def stop(self) -> None:
        """Hangs up on all pullers."""
        await self._port.stop()


class _StreamServer:
    """Answers the requests of one stream: `server(stream)` returns when the puller hangs up."""

    def __init__(self, arena: Arena, authorize: Authorize) -> None:
        self._arena = arena
        self._octets = np.frombuffer(arena.buffer, dtype=np.uint8)
        self._authorize = authorize

    def __call__(self, stream: Stream) -> None:
        while (request := receive_request(stream)) is not None:
            self._answer(stream, *request)
            if stream.is_tiresome:
                return
            stream.enter(Phase.IDLE)

    def _answer(self, stream: Stream, number: int, token: str, ranges: Ranges) -> None:
        sock = stream.sock
        check_ranges(ranges, self._arena)
        if not stream.may_read(token, ranges["block"].tolist(), self._authorize):
            sock.sendall(REPLY.pack(number, Status.GONE))
            return
        before = self._arena.generations[ranges["block"]]
        sock.sendall(REPLY.pack(number, Status.OK) + before.tobytes())
        send_pieces(sock, self._octets, ranges["offset"].astype(np.int64), ranges["length"].astype(np.int64))
        sock.sendall(self._arena.generations[ranges["block"]].tobytes())


def receive_request(stream: Stream) -> tuple[int, str, Ranges] | None:
    """(number, token, ranges, none of them checked yet), and the stream is answering; None: the puller has hung up.

    Raises:
        InvalidArgument: it asks for no ranges, or for too many.
    """
    sock, header = stream.sock, memoryview(bytearray(REQUEST.size))
    num_bytes = sock.recv_into(header)
    if num_bytes == 0:
        return None
    stream.enter(Phase.ASKING)
    if num_bytes < REQUEST.size:
        receive_views(sock, [header[num_bytes:]])
    number, token, count = REQUEST.unpack(header)
    if not 1 <= count <= MAX_RANGES:
        raise InvalidArgument(f"tcp: a request has 1 to {MAX_RANGES} ranges, got {count}")
    packed = bytearray(count * RANGE.itemsize)
    receive_views(sock, [memoryview(packed)])
    stream.enter(Phase.ANSWERING)
    return number, token.decode("ascii", errors="replace"), np.frombuffer(packed, dtype=RANGE)
