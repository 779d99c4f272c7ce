"""The source's side of `bench transfer`, a process of its own: `python -m pd_ops.bench.moving_source OPTIONS`.

For each case an arena full of random bytes, served by each transport, and by a bare socket that sends the same pieces
on every request byte: what the kernel can do, without any protocol. Ends at the end of standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import SourceTransport
from kv_transfer.transports import source_transports
from pd_engine.cache.arena import Arena
from pd_engine.settings import TransferSettings
from pd_kernels.block_checksum.ranges import range_checksums
from pd_kernels.block_stream.reference import send_views, views_of
from pd_ops.bench.measured_process import Document
from pd_ops.bench.moving_cases import MovingCase, moving_cases

HOST = "127.0.0.1"
EPOCH = "e" * 32
TOKEN = "f" * 32
SEED = 1


class CaseSource:
    """One case: its arena, and everything that serves it."""

    def __init__(self, case: MovingCase, transports: Sequence[str], secret: str) -> None:
        self._case = case
        self._arena = Arena(case.layout, case.num_blocks)
        np.frombuffer(self._arena.buffer, dtype=np.uint8)[self._arena.offsets[0] :] = _random(self._arena)
        self._transports: list[SourceTransport] = [
            transport for name in transports
            for transport in source_transports(_settings(name), secret=secret, host=HOST)
        ]

    async def start(self) -> Document:
        """How to reach it, and the checksums of the pieces in the order of the case's spans."""
        allowed = frozenset(range(self._case.num_blocks))
        for transport in self._transports:
            await transport.start(self._arena, EPOCH, lambda token: allowed if token == TOKEN else None)
        listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._serve_bare, args=(listener,), daemon=True).start()
        octets, spans = np.frombuffer(self._arena.buffer, dtype=np.uint8), self._case.spans()
        checksums = range_checksums(octets, spans.source_offsets, spans.lengths)
        return {
            "metadata": {transport.name: dict(transport.metadata()) for transport in self._transports},
            "bare_port": listener.getsockname()[1], "checksums": [int(value) for value in checksums],
        }

    async def stop(self) -> None:
        for transport in self._transports:
            await transport.stop()
        self._arena.close()

    def _serve_bare(self, listener: socket.socket) -> None:
        spans = self._case.spans()
        views = views_of(self._arena.buffer, spans.source_offsets, spans.lengths)
        puller, _ = listener.accept()
        with listener, puller:
            puller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while puller.recv(1):
                send_views(puller, views)


def _random(arena: Arena) -> npt.NDArray[np.uint8]:
    """Of the arena's whole body."""
    return np.random.default_rng(SEED).integers(0, 256, arena.num_bytes - arena.offsets[0], dtype=np.uint8)


def _settings(transport: str) -> TransferSettings:
    return TransferSettings.model_validate({"transport": transport})


async def _main(options: Document) -> None:
    cases = moving_cases(options["region_bytes"], options["num_pieces"])
    sources = [CaseSource(case, options["transports"], options["secret"]) for case in cases]
    ready = [await source.start() for source in sources]
    print(json.dumps({"ready": {"cases": ready}}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for source in sources:
        await source.stop()
    os._exit(0)  # the threads of bare sockets wait for ever


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
