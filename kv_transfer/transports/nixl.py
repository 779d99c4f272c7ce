"""The transport over NIXL (UCX: RDMA, NVLink, shared memory, TCP): the puller reads the source's memory.

Nothing that NIXL has begun can be called back: releasing a transfer does not end it. So data land in staging memory of
the connection, and are copied into the arena (and checksummed, in the same pass) only when all of a fetch is there and
still wanted. A fetch that is given up and does not end soon leaves its staging to the transfer: the connection is used
no more, and its memory goes with its agent.

    READ generations -> READ ranges -> READ generations -> copy

One agent and one thread a connection: a stalled source holds up nobody else's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kv_transfer.threads import run_in_thread
from kv_transfer.transport import (
    Bytes,
    Capabilities,
    ChecksumAt,
    Connection,
    Copy,
    Ending,
    Fetched,
    Metadata,
    Spans,
    UInt64s,
)
from kv_transfer.transports.closing import Closing
from kv_transfer.transports.fetches import Fetches
from kv_transfer.transports.handshake import connect, receive
from kv_transfer.transports.interest import Interest
from kv_transfer.transports.nixl_agent import MakeAgent, make_nixl_agent
from kv_transfer.transports.nixl_reader import NixlReader
from kv_transfer.transports.nixl_source import MAX_METADATA_BYTES, NAME, WELCOME
from kv_transfer.transports.watch import until_hung_up
from kv_transfer.wire import Fields
from pd_engine.cache.arena import Arena, component_offsets
from pd_engine.errors import DeadlineExceeded, InvalidArgument, PdRelayError, Unavailable

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class NixlPull:
    """Reads sources' arenas."""

    name = NAME
    capabilities = Capabilities(
        ending=Ending.STAGING, ending_ms=1_000, one_sided=True, across_hosts=True, checksum_at=ChecksumAt.COPY
    )

    def __init__(self, arena: Arena, *, secret: str, copy: Copy, make_agent: MakeAgent = make_nixl_agent) -> None:
        self._arena = arena
        self._secret = secret
        self._copy = copy
        self._make_agent = make_agent

    async def connect(
        self, metadata: Metadata, *, epoch: str, token: str, num_blocks: int, timeout_s: float
    ) -> Connection:
        fields = Fields(dict(metadata), NAME)
        address = (fields.ip_address("host"), fields.integer("port", 1, 65_535))
        fields.done()
        num_bytes = component_offsets(self._arena.layout, num_blocks)[1]
        sock = await connect(address, secret=self._secret, epoch=epoch, token=token, timeout_s=timeout_s)
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                source_address, agent_metadata = await _receive_welcome(sock, num_bytes)
                connection = NixlConnection(sock, num_blocks, source_address, self._arena, self._copy)
                await connection.open(self._make_agent, agent_metadata)
        except BaseException as error:
            sock.close()
            if connection is not None:
                await connection.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the source did not say within {timeout_s} s how to read it") from None
            raise
        return connection

    async def close(self) -> None:
        return


class NixlConnection:
    """One agent that knows one source. Everything that touches the agent runs in the connection's thread."""

    def __init__(
        self, sock: socket.socket, num_blocks: int, source_address: int, arena: Arena, copy: Copy
    ) -> None:
        self._sock = sock
        self._num_blocks = num_blocks
        self._source_address = source_address
        self._destination = np.frombuffer(arena.buffer, dtype=np.uint8)
        self._copy = copy
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-nixl")
        self._reader: NixlReader | None = None
        self._fetches = Fetches()
        self._closing = Closing(self._end)
        self._is_abandoned = False  # a transfer that nobody waits for may still write to the staging memory
        self._watcher = asyncio.create_task(until_hung_up(sock), name="kv-nixl-watch")

    @property
    def usable(self) -> bool:
        return not self._watcher.done() and not self._is_abandoned

    async def open(self, make_agent: MakeAgent, metadata: bytes) -> None:
        name = f"puller-{secrets.token_hex(16)}"
        self._reader = await run_in_thread(self._executor, lambda: NixlReader(make_agent(name), metadata))

    async def fetch(self, spans: Spans, *, token: str, timeout_s: float) -> Fetched:
        if not self.usable:
            raise Unavailable("the source is gone")
        return await self._fetches.run(
            self._executor, partial(self._run, spans), num_bytes=spans.num_bytes, timeout_s=timeout_s
        )

    async def quiesce(self) -> None:
        await self._fetches.quiesce()

    async def close(self) -> None:
        self._watcher.cancel()
        await self._closing.wait()

    async def _end(self) -> None:
        await asyncio.gather(self._watcher, return_exceptions=True)
        await self._fetches.abandon()
        self._sock.close()
        if self._reader is not None:
            ended = run_in_thread(self._executor, self._end_reader)
            await asyncio.wait([ended], timeout=CLOSE_TIMEOUT_S)
            if not ended.done():
                log.error("an agent of %s did not end within %s s; its thread and memory stay", NAME, CLOSE_TIMEOUT_S)
        self._executor.shutdown(wait=False)

    def _run(self, spans: Spans, interest: Interest) -> Fetched:
        """In the connection's thread."""
        assert self._reader is not None
        if self._is_abandoned or not interest.is_wanted:
            raise Unavailable("nobody waits for this fetch any more")
        staged_N = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(spans.lengths)[:-1]])
        try:
            staging = self._reader.staging(spans.num_bytes + 8 * self._num_blocks)
            before = self._read_generations(spans, staging, interest)
            self._reader.read(self._source_address + spans.source_offsets, staged_N, spans.lengths, interest)
            after = self._read_generations(spans, staging, interest)
        except PdRelayError:
            self._is_abandoned = True
            raise
        if not interest.is_wanted:
            raise Unavailable("nobody waits for this fetch any more")
        checksums = self._copy(staging, self._destination, staged_N, spans.offsets, spans.lengths)
        return Fetched(generations_before=before, generations_after=after, checksums=checksums)

    def _read_generations(self, spans: Spans, staging: Bytes, interest: Interest) -> UInt64s:
        """uint64 [n]: of the header of the source's arena, from the first to the last block that is asked for."""
        assert self._reader is not None
        first, count = int(spans.block_ids.min()), int(np.ptp(spans.block_ids)) + 1
        start = spans.num_bytes + -spans.num_bytes % 8
        place = np.array([start]), np.array([8 * count])
        self._reader.read(np.array([self._source_address + 8 * first]), *place, interest)
        generations: UInt64s = staging[start : start + 8 * count].view(np.uint64)[spans.block_ids - first]
        return generations

    def _end_reader(self) -> None:
        if self._reader is not None:
            self._reader.end(is_quiet=not self._is_abandoned)
            self._reader = None


async def _receive_welcome(sock: socket.socket, num_bytes: int) -> tuple[int, bytes]:
    """(address of the source's arena, metadata of its agent).

    Raises:
        InvalidArgument: the arena is not the one that the layout says.
        Unavailable: the source hung up.
    """
    said_bytes, address, length = WELCOME.unpack(await receive(sock, WELCOME.size))
    if said_bytes != num_bytes or not 1 <= length <= MAX_METADATA_BYTES:
        raise InvalidArgument(f"{NAME}: the arena must have {num_bytes} bytes, got {said_bytes}")
    return address, await receive(sock, length)
