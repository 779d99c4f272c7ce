"""The transport between hosts: framed, scattered straight into the arena, over several streams.

A fetch takes one stream for its time. Whoever stops waiting hangs that stream up, and its thread ends; the next fetch
connects it anew. So one cancelled fetch costs the others nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from kv_transfer.threads import run_in_thread
from kv_transfer.transport import (
    Capabilities,
    ChecksumAt,
    Connection,
    Ending,
    Fetched,
    Metadata,
    Receive,
    Spans,
)
from kv_transfer.transports.closing import Closing
from kv_transfer.transports.handshake import connect
from kv_transfer.transports.stream_book import IDLE_S
from kv_transfer.transports.streams import hang_up, prepare
from kv_transfer.transports.tcp_frames import GENERATION, MAX_RANGES, REPLY, REQUEST, Status, ranges_of
from kv_transfer.transports.tcp_source import NAME
from kv_transfer.transports.watch import is_silent
from kv_transfer.wire import Fields
from pd_engine.cache.arena import Arena
from pd_engine.errors import DeadlineExceeded, Gone, Internal, Unavailable
from pd_kernels.block_stream.reference import receive_views

NUM_STREAMS = 2
REUSE_S = IDLE_S / 2  # an older idle stream is about to be hung up on


class TcpPull:
    """Connects to sources' ports."""

    name = NAME
    capabilities = Capabilities(
        ending=Ending.REVOKE, ending_ms=1_000, one_sided=False, across_hosts=True, checksum_at=ChecksumAt.ARRIVAL
    )

    def __init__(self, arena: Arena, *, secret: str, receive: Receive) -> None:
        self._arena = arena
        self._secret = secret
        self._receive = receive

    async def connect(
        self, metadata: Metadata, *, epoch: str, token: str, num_blocks: int, timeout_s: float
    ) -> Connection:
        fields = Fields(dict(metadata), NAME)
        address = (fields.ip_address("host"), fields.integer("port", 1, 65_535))
        fields.done()
        connection = TcpConnection(address, self._arena, secret=self._secret, epoch=epoch, receive=self._receive)
        await connection.probe(token, timeout_s)
        return connection

    async def close(self) -> None:
        return


class _Stream:
    """One socket, and the fetch that uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.stop = np.zeros(1, dtype=np.uint8)  # looked at by compiled loops
        self.used_s = asyncio.get_running_loop().time()

    @property
    def is_stopped(self) -> bool:
        return bool(self.stop[0])

    @property
    def is_fresh(self) -> bool:
        """Whether an idle one may be used again."""
        return asyncio.get_running_loop().time() < self.used_s + REUSE_S and is_silent(self.sock)

    def hang_up(self) -> None:
        self.stop[0] = 1
        hang_up(self.sock)


class TcpConnection:
    """Up to `NUM_STREAMS` streams to one life of one source."""

    def __init__(
        self, address: tuple[str, int], arena: Arena, *, secret: str, epoch: str, receive: Receive
    ) -> None:
        self._address = address
        self._exchange = _Exchange(arena, receive)
        self._secret = secret
        self._epoch = epoch
        self._idle: list[_Stream] = []
        self._may_fetch = asyncio.Semaphore(NUM_STREAMS)
        self._waiting: dict[asyncio.Timeout, float] = {}  # of fetches without a stream: in how many seconds
        self._executor = ThreadPoolExecutor(max_workers=NUM_STREAMS, thread_name_prefix="kv-tcp")
        self._unfinished: dict[asyncio.Future[Fetched], _Stream] = {}
        self._numbers = itertools.count(1)
        self._is_dead = False
        self._is_closed = False
        self._closing = Closing(self._end)

    @property
    def usable(self) -> bool:
        return not self._is_dead

    async def probe(self, token: str, timeout_s: float) -> None:
        """Opens the first stream, so that refusals come at connection."""
        try:
            self._idle.append(await self._open(token, timeout_s))
        except BaseException:
            await self.close()
            raise

    async def fetch(self, spans: Spans, *, token: str, timeout_s: float) -> Fetched:
        try:
            async with asyncio.timeout(timeout_s) as limit, self._turn(limit, timeout_s):
                stream = self._take_idle() or await self._open(token, timeout_s)
                if self._is_closed:
                    stream.sock.close()
                    raise Unavailable("the connection has been closed")
                return await self._fetch_on(stream, spans, token)
        except TimeoutError:
            raise DeadlineExceeded(f"{spans.num_bytes} bytes did not come within {timeout_s} s") from None
        except Unavailable:
            self._is_dead = True
            raise

    async def quiesce(self) -> None:
        stopped = [job for job, stream in self._unfinished.items() if stream.is_stopped]
        if stopped:
            await asyncio.wait(stopped)

    async def close(self) -> None:
        self._is_dead = self._is_closed = True
        for stream in [*self._unfinished.values(), *self._idle]:
            stream.hang_up()
        await self._closing.wait()

    async def _end(self) -> None:
        if self._unfinished:
            await asyncio.wait(set(self._unfinished))
        for stream in self._idle:
            stream.sock.close()
        self._idle.clear()
        self._executor.shutdown(wait=False)  # its threads have no jobs any more, and end at once

    @asynccontextmanager
    async def _turn(self, limit: asyncio.Timeout, timeout_s: float) -> AsyncIterator[None]:
        """A stream's turn. Who waits for one waits as long as others get something: over a slow link that takes its
        time, and is no stalled peer."""
        self._waiting[limit] = timeout_s
        try:
            await self._may_fetch.acquire()
        finally:
            del self._waiting[limit]
        try:
            _begin_anew(limit, timeout_s)
            yield
        finally:
            self._may_fetch.release()

    async def _open(self, token: str, timeout_s: float) -> _Stream:
        sock = await connect(
            self._address, secret=self._secret, epoch=self._epoch, token=token, timeout_s=timeout_s
        )
        sock.setblocking(True)
        prepare(sock)
        return _Stream(sock)

    def _take_idle(self) -> _Stream | None:
        while self._idle:
            stream = self._idle.pop()
            if stream.is_fresh:
                return stream
            stream.sock.close()
        return None

    async def _fetch_on(self, stream: _Stream, spans: Spans, token: str) -> Fetched:
        try:
            job = run_in_thread(self._executor, partial(self._exchange, stream, spans, next(self._numbers), token))
        except Unavailable:
            stream.sock.close()
            raise
        self._unfinished[job] = stream
        job.add_done_callback(self._finished)
        try:
            return await asyncio.shield(job)
        finally:
            if not job.done():
                stream.hang_up()

    def _finished(self, job: asyncio.Future[Fetched]) -> None:
        stream = self._unfinished.pop(job)
        is_intact = not job.cancelled() and (job.exception() is None or isinstance(job.exception(), Gone))
        if is_intact and not stream.is_stopped:
            stream.used_s = asyncio.get_running_loop().time()
            self._idle.append(stream)
            for limit, timeout_s in self._waiting.items():
                _begin_anew(limit, timeout_s)
        else:
            stream.sock.close()


def _begin_anew(limit: asyncio.Timeout, timeout_s: float) -> None:
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time() + timeout_s)


class _Exchange:
    """In a thread of the pool: one request and its reply, or several if there are too many ranges for one."""

    def __init__(self, arena: Arena, receive: Receive) -> None:
        self._octets = np.frombuffer(arena.buffer, dtype=np.uint8)
        self._receive = receive

    def __call__(self, stream: _Stream, spans: Spans, number: int, token: str) -> Fetched:
        try:
            parts = [
                self._ask(stream, spans.part(slice(start, start + MAX_RANGES)), number, token)
                for start in range(0, len(spans), MAX_RANGES)
            ]
        except OSError as error:
            raise Unavailable(f"the source is gone: {error.strerror}") from None
        sums = [part.checksums for part in parts if part.checksums is not None]
        return Fetched(
            generations_before=np.concatenate([part.generations_before for part in parts]),
            generations_after=np.concatenate([part.generations_after for part in parts]),
            checksums=np.concatenate(sums) if sums else None,
        )

    def _ask(self, stream: _Stream, spans: Spans, number: int, token: str) -> Fetched:
        """Raises: OSError: the source has gone, or nobody waits for this fetch any more."""
        sock, count = stream.sock, len(spans)
        sock.sendall(REQUEST.pack(number, token.encode("ascii"), count) + ranges_of(spans).tobytes())
        header, before = bytearray(REPLY.size), bytearray(count * GENERATION.itemsize)
        receive_views(sock, [memoryview(header)])
        answered, status = REPLY.unpack(header)
        if status == Status.GONE and answered == number:
            raise Gone
        if status != Status.OK or answered != number:
            raise Internal(f"tcp: reply {answered} with status {status} to request {number}")
        receive_views(sock, [memoryview(before)])
        checksums = self._receive(sock, self._octets, spans.offsets, spans.lengths, stream.stop)
        after = bytearray(count * GENERATION.itemsize)
        receive_views(sock, [memoryview(after)])
        return Fetched(
            generations_before=np.frombuffer(before, dtype=GENERATION),
            generations_after=np.frombuffer(after, dtype=GENERATION), checksums=checksums,
        )
