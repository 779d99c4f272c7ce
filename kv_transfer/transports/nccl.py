"""The transport over NCCL, between GPUs without RDMA libraries: one communicator of two ranks for each source and
puller, so that an abort stays between the two. Requests go over an authenticated socket, the bytes through the pair.

NCCL knows no deadlines and cannot cancel one message. Data land in the pair's staging memory and are copied into the
arena only while they are wanted; a fetch that is given up and does not end soon costs the pair, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kv_transfer.threads import run_in_thread
from kv_transfer.transport import Capabilities, Connection, Ending, Fetched, Metadata, Spans
from kv_transfer.transports.closing import Closing
from kv_transfer.transports.fetches import Fetches
from kv_transfer.transports.handshake import connect, receive
from kv_transfer.transports.interest import Interest
from kv_transfer.transports.nccl_messages import messages_of
from kv_transfer.transports.nccl_pair import (
    PULLER_RANK,
    STAGING_BYTES,
    UNIQUE_ID_BYTES,
    MakeNccl,
    Nccl,
    Pair,
    load_nccl,
    wait_ready,
)
from kv_transfer.transports.nccl_source import NAME, OK, pause
from kv_transfer.transports.streams import hang_up, prepare
from kv_transfer.transports.tcp_frames import GENERATION, MAX_RANGES, REPLY, REQUEST, Status, ranges_of
from kv_transfer.transports.watch import is_silent
from kv_transfer.wire import Fields
from pd_engine.cache.arena import Arena
from pd_engine.errors import DeadlineExceeded, Gone, Internal, Unavailable
from pd_kernels.block_copy import copy_pieces
from pd_kernels.block_stream.reference import receive_views


class NcclPull:
    """Connects to sources' ports."""

    name = NAME
    capabilities = Capabilities(
        ending=Ending.STAGING, ending_ms=1_000, one_sided=False, across_hosts=True, device_memory=True
    )

    def __init__(self, arena: Arena, *, secret: str, make_nccl: MakeNccl = load_nccl) -> None:
        self._arena = arena
        self._secret = secret
        self._make_nccl = make_nccl

    async def connect(
        self, metadata: Metadata, *, epoch: str, token: str, num_blocks: int, timeout_s: float
    ) -> Connection:
        fields = Fields(dict(metadata), NAME)
        address = (fields.ip_address("host"), fields.integer("port", 1, 65_535))
        fields.done()
        nccl = self._make_nccl()
        sock = await connect(address, secret=self._secret, epoch=epoch, token=token, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await receive(sock, 1 + UNIQUE_ID_BYTES)
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the source named no NCCL pair within {timeout_s} s") from None
            raise
        if answer[:1] != OK:
            sock.close()
            raise Unavailable("the source has as many NCCL pairs as it can")
        connection = NcclConnection(sock, self._arena)
        await connection.open(nccl, answer[1:], timeout_s)
        return connection

    async def close(self) -> None:
        return


class NcclConnection:
    """One end of a pair; everything that touches it runs in the connection's thread, one fetch at a time."""

    def __init__(self, sock: socket.socket, arena: Arena) -> None:
        sock.setblocking(True)
        prepare(sock)
        self._sock = sock
        self._octets = np.frombuffer(arena.buffer, dtype=np.uint8)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-nccl")
        self._numbers = itertools.count(1)
        self._pair: Pair | None = None
        self._fetches = Fetches()
        self._closing = Closing(self._end)
        self._is_dead = False

    @property
    def usable(self) -> bool:
        return not self._is_dead

    async def open(self, nccl: Nccl, unique_id: bytes, timeout_s: float) -> None:
        """Raises: DeadlineExceeded, Unavailable: the pair did not connect."""
        interest = Interest()
        try:
            job = run_in_thread(self._executor, partial(self._join, nccl, unique_id, interest))
        except Unavailable:
            await self.close()
            raise
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(job)
        except BaseException as error:
            interest.abandon()
            await asyncio.wait([job])
            job.exception()
            await self.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the NCCL pair did not connect within {timeout_s} s") from None
            raise

    async def fetch(self, spans: Spans, *, token: str, timeout_s: float) -> Fetched:
        if self._is_dead:
            raise Unavailable("the source is gone")
        return await self._fetches.run(
            self._executor, partial(self._run, spans, token), num_bytes=spans.num_bytes, timeout_s=timeout_s,
            on_abandoned=self._break_off,
        )

    async def quiesce(self) -> None:
        await self._fetches.quiesce()

    async def close(self) -> None:
        self._break_off()
        await self._closing.wait()

    async def _end(self) -> None:
        await self._fetches.abandon()
        if self._pair is not None:
            await run_in_thread(self._executor, self._abort)
        self._sock.close()
        self._executor.shutdown(wait=False)  # its thread has no job any more, and ends at once

    def _break_off(self) -> None:
        """The pair ends as a whole; the source notices at the socket."""
        self._is_dead = True
        hang_up(self._sock)

    def _join(self, nccl: Nccl, unique_id: bytes, interest: Interest) -> None:
        self._pair = nccl.join(unique_id, PULLER_RANK)
        wait_ready(self._pair, lambda: not interest.is_abandoned and is_silent(self._sock), pause)

    def _run(self, spans: Spans, token: str, interest: Interest) -> Fetched:
        """In the connection's thread."""
        if self._is_dead or not interest.is_wanted:
            raise Unavailable("nobody waits for this fetch any more")
        assert self._pair is not None and len(spans) <= MAX_RANGES, len(spans)
        try:
            return self._exchange(self._pair, spans, token, interest)
        except OSError as error:
            self._is_dead = True
            raise Unavailable(f"the source is gone: {error.strerror}") from None
        except (Unavailable, Internal):
            self._is_dead = True
            raise
        finally:
            if self._is_dead:
                self._abort()

    def _exchange(self, pair: Pair, spans: Spans, token: str, interest: Interest) -> Fetched:
        sock, count, number = self._sock, len(spans), next(self._numbers)
        request = REQUEST.pack(number, token.encode("ascii"), count) + ranges_of(spans).tobytes()
        sock.sendall(request)
        header = bytearray(REPLY.size)
        receive_views(sock, [memoryview(header)])
        answered, status = REPLY.unpack(header)
        if status == Status.GONE and answered == number:
            raise Gone
        if status != Status.OK or answered != number:
            raise Internal(f"nccl: reply {answered} with status {status} to request {number}")
        before, after = bytearray(count * GENERATION.itemsize), bytearray(count * GENERATION.itemsize)
        receive_views(sock, [memoryview(before)])
        for message in messages_of(spans.offsets, spans.lengths, STAGING_BYTES):
            pair.receive(message.num_bytes)
            wait_ready(pair, lambda: not interest.is_abandoned, pause)
            if interest.is_wanted:
                copy_pieces(pair.received(), self._octets, message.offsets, message.arena_offsets, message.lengths)
        receive_views(sock, [memoryview(after)])
        return Fetched(
            generations_before=np.frombuffer(before, dtype=GENERATION),
            generations_after=np.frombuffer(after, dtype=GENERATION),
        )

    def _abort(self) -> None:
        if self._pair is not None:
            self._pair.abort()
            self._pair = None
