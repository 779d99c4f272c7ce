"""The source's half of the nccl transport.

    after the handshake     source -> puller   OK, or BUSY if it has too many pairs (1 byte), unique id (128 bytes)
    then                    requests and replies as over tcp, but the bytes of the ranges go through the pair

A pair costs device memory at both ends, so a source has a bounded number of them.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from kv_transfer.transport import Authorize, Metadata
from kv_transfer.transports.nccl_messages import messages_of
from kv_transfer.transports.nccl_pair import (
    SOURCE_RANK,
    STAGING_BYTES,
    UNIQUE_ID_BYTES,
    MakeNccl,
    Nccl,
    Pair,
    load_nccl,
    wait_ready,
)
from kv_transfer.transports.stream_book import Phase, Stream
from kv_transfer.transports.streams import StreamPort
from kv_transfer.transports.tcp_frames import REPLY, Ranges, Status, check_ranges
from kv_transfer.transports.tcp_source import receive_request
from kv_transfer.transports.watch import is_silent
from pd_engine.cache.arena import Arena
from pd_kernels.block_copy import copy_pieces

NAME = "nccl"
OK, BUSY = b"\0", b"\1"
MAX_PAIRS = 16
MAX_PAIRS_A_TOKEN = 2  # a puller has one, and another while that one ends
EVICTION_S = 1.0  # until a pair that has to go is gone
POLL_PERIOD_S = 0.000_1


class NcclSource:
    """Args:
    host: the address on which pullers ask; the bytes go over whatever NCCL finds.
    """

    name = NAME

    def __init__(self, *, secret: str, host: str, make_nccl: MakeNccl = load_nccl) -> None:
        self._host = host
        self._port = StreamPort(secret=secret, host=host, name="kv-nccl-source")
        self._make_nccl = make_nccl

    async def start(self, arena: Arena, epoch: str, authorize: Authorize) -> None:
        self._port.start(epoch, authorize, _PairServer(self._make_nccl(), arena, authorize))

    def metadata(self) -> Metadata:
        return {"host": self._host, "port": self._port.port}

    async def stop(self) -> None:
        """Hangs up on all pullers and aborts their pairs."""
        await self._port.stop()


class _PairServer:
    """Serves one puller, in a thread for each: `server(stream)` returns when the puller hangs up."""

    def __init__(self, nccl: Nccl, arena: Arena, authorize: Authorize) -> None:
        self._nccl = nccl
        self._arena = arena
        self._octets = np.frombuffer(arena.buffer, dtype=np.uint8)
        self._authorize = authorize
        self._paired: set[Stream] = set()
        self._changed = threading.Condition()

    def __call__(self, stream: Stream) -> None:
        sock = stream.sock
        if not self._has_room(stream):
            sock.sendall(BUSY + bytes(UNIQUE_ID_BYTES))
            return
        try:
            unique_id = self._nccl.unique_id()
            sock.sendall(OK + unique_id)
            pair = self._nccl.join(unique_id, SOURCE_RANK)
            try:
                wait_ready(pair, lambda: is_silent(sock), pause)
                while (request := receive_request(stream)) is not None:
                    self._answer(stream, pair, *request)
                    if stream.is_tiresome:
                        return
                    stream.enter(Phase.IDLE)
            finally:
                pair.abort()
        finally:
            with self._changed:
                self._paired.remove(stream)
                self._changed.notify_all()

    def _has_room(self, new: Stream) -> bool:
        """For one more pair, which has its place then. The one that has been idle for longest goes for it, if all are
        taken, and its token has ended."""
        with self._changed:
            if sum(stream.token == new.token for stream in self._paired) >= MAX_PAIRS_A_TOKEN:
                return False
            if len(self._paired) >= MAX_PAIRS:
                ended = [stream for stream in self._paired if stream.phase[0] is Phase.IDLE
                         and not stream.is_cut and self._authorize(stream.token) is None]
                if not ended:
                    return False
                min(ended, key=lambda stream: stream.phase[1]).cut()
                if not self._changed.wait_for(lambda: len(self._paired) < MAX_PAIRS, EVICTION_S):
                    return False
            self._paired.add(new)
            return True

    def _answer(self, stream: Stream, pair: Pair, number: int, token: str, ranges: Ranges) -> None:
        sock = stream.sock
        check_ranges(ranges, self._arena)
        if not stream.may_read(token, ranges["block"].tolist(), self._authorize):
            sock.sendall(REPLY.pack(number, Status.GONE))
            return
        before = self._arena.generations[ranges["block"]]
        sock.sendall(REPLY.pack(number, Status.OK) + before.tobytes())
        staging = np.empty(STAGING_BYTES, dtype=np.uint8)
        offsets, lengths = ranges["offset"].astype(np.int64), ranges["length"].astype(np.int64)
        for message in messages_of(offsets, lengths, STAGING_BYTES):
            copy_pieces(self._octets, staging, message.arena_offsets, message.offsets, message.lengths)
            pair.send(staging[: message.num_bytes])
            wait_ready(pair, lambda: is_silent(sock), pause)
        sock.sendall(self._arena.generations[ranges["block"]].tobytes())


def pause() -> None:
    time.sleep(POLL_PERIOD_S)
