"""The transport of one host: the source's memory file is passed over a unix socket, mapped read-only and copied from
by the puller. The source's process takes no part in a fetch: stopped or dead, what it had published can be read.

    after the handshake     source -> puller   length of the memory file (8 bytes, little-endian), its descriptor

The socket stays open: its end says that the source's process is gone. It is an abstract one (no file is left behind,
and it exists in the network namespace of the host only).
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np

from kv_transfer.transport import (
    Authorize,
    Capabilities,
    ChecksumAt,
    Connection,
    Copy,
    Ending,
    Fetched,
    Metadata,
    Spans,
    UInt64s,
    runs_of,
)
from kv_transfer.transports.closing import Closing
from kv_transfer.transports.fetches import Fetches
from kv_transfer.transports.handshake import connect, receive
from kv_transfer.transports.interest import Interest
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.watch import until_hung_up
from kv_transfer.wire import Fields
from pd_engine.cache.arena import Arena, component_offsets
from pd_engine.errors import DeadlineExceeded, InvalidArgument, Unavailable

NAME = "shared_memory"
MAX_NAME_CHARS = 64
LENGTH = struct.Struct("<Q")
SLICE_BYTES = 16 * 1024 * 1024  # copied between two looks at whether anybody still wants it


class SharedMemorySource:
    """Passes the arena's descriptor to pullers that know the secret."""

    name = NAME

    def __init__(self, *, secret: str) -> None:
        self._secret = secret
        self._path = f"pd-relay-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener: Listener | None = None
        self._arena: Arena | None = None

    async def start(self, arena: Arena, epoch: str, authorize: Authorize) -> None:
        self._arena = arena
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + self._path)
        self._listener = Listener(
            sock, secret=self._secret, epoch=epoch, authorize=authorize, serve=self._serve
        )
        self._listener.start()

    def metadata(self) -> Metadata:
        return {"path": self._path}

    async def stop(self) -> None:
        if self._listener is not None:
            await self._listener.stop()
            self._listener = None

    async def _serve(self, puller: socket.socket, token: str) -> None:
        """Passes the descriptor, then waits for the puller to hang up."""
        assert self._arena is not None
        read_only = os.open(f"/proc/self/fd/{self._arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(puller, [LENGTH.pack(self._arena.num_bytes)], [read_only])
        finally:
            os.close(read_only)
        await until_hung_up(puller)


class SharedMemoryPull:
    """Maps sources' arenas and copies out of them, in a thread of its own."""

    name = NAME
    capabilities = Capabilities(
        ending=Ending.CANCEL, ending_ms=1_000, one_sided=True, across_hosts=False, checksum_at=ChecksumAt.COPY
    )

    def __init__(self, arena: Arena, *, secret: str, copy: Copy) -> None:
        self._arena = arena
        self._secret = secret
        self._copy = copy
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")

    async def connect(
        self, metadata: Metadata, *, epoch: str, token: str, num_blocks: int, timeout_s: float
    ) -> Connection:
        fields = Fields(dict(metadata), NAME)
        path = fields.text("path", MAX_NAME_CHARS)
        fields.done()
        num_bytes = component_offsets(self._arena.layout, num_blocks)[1]
        sock = await connect(path, secret=self._secret, epoch=epoch, token=token, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                source_map = await _receive_map(sock, num_bytes)
        except TimeoutError:
            sock.close()
            raise DeadlineExceeded(f"the source passed no memory within {timeout_s} s") from None
        except BaseException:
            sock.close()
            raise
        return SharedMemoryConnection(sock, source_map, num_blocks, self._arena, self._copy, self._executor)

    async def close(self) -> None:
        await asyncio.to_thread(self._executor.shutdown)


class SharedMemoryConnection:
    """A mapping of one source's arena."""

    def __init__(
        self, sock: socket.socket, source_map: mmap.mmap, num_blocks: int, arena: Arena, copy: Copy,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._sock = sock
        self._map = source_map
        self._source = np.frombuffer(source_map, dtype=np.uint8)
        self._generations = self._source[: num_blocks * 8].view(np.uint64)
        self._destination = np.frombuffer(arena.buffer, dtype=np.uint8)
        self._copy = copy
        self._executor = executor
        self._fetches = Fetches()
        self._is_closed = False
        self._closing = Closing(self._end)
        self._watcher = asyncio.create_task(until_hung_up(sock), name="kv-shared-memory-watch")

    @property
    def usable(self) -> bool:
        return not self._watcher.done()

    async def fetch(self, spans: Spans, *, token: str, timeout_s: float) -> Fetched:
        if self._is_closed:
            raise Unavailable("the connection has been closed")
        return await self._fetches.run(
            self._executor, partial(self._run, spans), num_bytes=spans.num_bytes, timeout_s=timeout_s
        )

    async def quiesce(self) -> None:
        await self._fetches.quiesce()

    async def close(self) -> None:
        """Also unmaps the arena, when nothing reads it any more."""
        self._is_closed = True
        self._watcher.cancel()
        await self._closing.wait()

    async def _end(self) -> None:
        await asyncio.gather(self._watcher, return_exceptions=True)
        await self._fetches.abandon()
        self._sock.close()
        self._source, self._generations = np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint64)
        with suppress(BufferError):  # an error of a fetch still refers to it: it is unmapped when nothing does
            self._map.close()

    def _run(self, spans: Spans, interest: Interest) -> Fetched:
        """In the copying thread. The copy refuses ranges beyond either arena."""
        before = self._generations[spans.block_ids]
        checksums: list[UInt64s] = []
        for run in runs_of(spans.lengths, SLICE_BYTES):
            if not interest.is_wanted:
                raise DeadlineExceeded("nobody waits for this fetch any more")
            sums = self._copy(
                self._source, self._destination, spans.source_offsets[run], spans.offsets[run], spans.lengths[run]
            )
            if sums is not None:
                checksums.append(sums)
        return Fetched(
            generations_before=before, generations_after=self._generations[spans.block_ids],
            checksums=np.concatenate(checksums) if checksums else None,
        )


async def _receive_map(sock: socket.socket, num_bytes: int) -> mmap.mmap:
    """The arena that the source passes, mapped read-only.

    Raises:
        InvalidArgument: it is not the file that the layout says, or could shrink under its reader.
        Unavailable: the source hung up.
    """
    fd = await _receive_fd(sock, num_bytes)
    try:
        if os.fstat(fd).st_size != num_bytes:
            raise InvalidArgument(f"{NAME}: the arena must have {num_bytes} bytes, got {os.fstat(fd).st_size}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise InvalidArgument(f"{NAME}: the arena must be sealed against shrinking")
        return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise InvalidArgument(f"{NAME}: what the source passed is no arena: {error.strerror}") from None
    finally:
        os.close(fd)


async def _receive_fd(sock: socket.socket, num_bytes: int) -> int:
    await _readable(sock)
    try:
        data, fds, flags, _ = socket.recv_fds(sock, LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"the source is gone: {error.strerror}") from None
    if len(fds) != 1 or flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise Unavailable("the source passed no memory")
    try:
        data += await receive(sock, LENGTH.size - len(data))
        if LENGTH.unpack(data)[0] != num_bytes:
            raise InvalidArgument(f"{NAME}: the arena must have {num_bytes} bytes, got {LENGTH.unpack(data)[0]}")
    except BaseException:
        os.close(fds[0])
        raise
    return fds[0]


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
