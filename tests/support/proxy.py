"""A TCP proxy that can be cut, stopped and healed: what a network does to two processes."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class Proxy:
    """Forwards connections to `target` ("host:port"); listens on `address` once entered."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.num_connections = 0
        self.num_bytes = 0
        self.cut_at_byte: int | None = None

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every connection is reset; new ones work."""
        for writer in list(self._writers):
            writer.transport.abort()

    def stop(self) -> None:
        """Half-open: nothing is forwarded any more, and nobody is told."""
        self._flows.clear()

    def heal(self) -> None:
        self._flows.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            there_reader, there = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there}
        for source, target in ((reader, there), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._flows.wait()
                self.num_bytes += len(data)
                if self.cut_at_byte is not None and self.num_bytes >= self.cut_at_byte:
                    self.cut_at_byte = None
                    self.cut()
                target.write(data)
                await target.drain()
        target.transport.abort()
        self._writers.discard(target)
