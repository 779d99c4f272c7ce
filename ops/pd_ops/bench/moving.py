"""The puller's side of `bench transfer`: every transport fetches the same bytes that a bare copy moves, in turns."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing

import numpy as np

from kv_transfer.transport import Connection, runs_of
from kv_transfer.transports import pull_transports
from kv_transfer.transports.tcp import NUM_STREAMS
from pd_engine.cache.arena import Arena
from pd_engine.errors import DataLoss
from pd_engine.settings import TransferSettings
from pd_kernels.block_checksum.ranges import range_checksums
from pd_kernels.block_copy import memcpy_pieces
from pd_kernels.block_stream.reference import receive_views, views_of
from pd_ops.bench.child import Child
from pd_ops.bench.measured_process import Document
from pd_ops.bench.moving_cases import MovingCase, MovingRow, moving_cases, moving_row
from pd_ops.bench.moving_source import EPOCH, HOST, TOKEN

TIMEOUT_S = 30.0
COPY, BARE_SOCKET = "copy", "bare socket"
AT_A_TIME = {"tcp": NUM_STREAMS}
ACROSS_HOSTS = ("tcp",)  # compared with a bare socket; the others with a copy
ACROSS_PROCESSES = (*ACROSS_HOSTS, BARE_SOCKET, "nixl")  # who waits for others: only the wall clock tells how long

Turn = Callable[[], Awaitable[None]]


async def measure_moving(
    transports: Sequence[str], *, rounds: int, region_bytes: int, num_pieces: int, note: Callable[[str], None]
) -> list[MovingRow]:
    """Rows of every transport and case, with and without checksums.

    Raises:
        Unavailable: the source's process failed.
        DataLoss: what arrived is not what was sent.
    """
    secret = secrets.token_hex(16)
    options = {
        "transports": list(transports), "region_bytes": region_bytes, "num_pieces": num_pieces, "secret": secret,
    }
    rows: list[MovingRow] = []
    command = [sys.executable, "-m", "pd_ops.bench.moving_source", json.dumps(options)]
    with closing(Child("source", command, threads=1)) as source:
        ready = await asyncio.to_thread(source.ready)
        for case, about in zip(moving_cases(region_bytes, num_pieces), ready["cases"], strict=True):
            async with AsyncExitStack() as stack:
                puller = CasePuller(case, about, secret=secret)
                stack.push_async_callback(puller.close)
                await puller.connect(transports)
                seconds = await _take_turns(puller.turns(), rounds, lambda text, case=case: note(  # type: ignore[misc]
                    f"{case.shape.value}: {text}"
                ))
                rows += _rows(case, transports, seconds)
    return rows


class CasePuller:
    """One case: an arena of its own, connections to the source, and the bare copies."""

    def __init__(self, case: MovingCase, about: Document, *, secret: str) -> None:
        self._case = case
        self._about = about
        self._secret = secret
        self._arena = Arena(case.layout, case.num_blocks)
        self._copied = Arena(case.layout, case.num_blocks)  # what the bare copy reads
        self._spans = case.spans()
        self._checksums = np.array(about["checksums"], dtype=np.uint64)
        self._connections: dict[tuple[str, bool], Connection] = {}  # by (transport, whether checksums are on)
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._bare: socket.socket | None = None
        np.frombuffer(self._copied.buffer, dtype=np.uint8)[self._copied.offsets[0] :] = 1
        np.frombuffer(self._arena.buffer, dtype=np.uint8)[self._arena.offsets[0] :] = 2

    async def connect(self, transports: Sequence[str]) -> None:
        for name, checksums in itertools.product(transports, (False, True)):
            settings = TransferSettings.model_validate({"transport": name, "checksums": checksums})
            [transport] = pull_transports(settings, self._arena, secret=self._secret)
            self._closers.append(transport.close)
            connection = await transport.connect(
                self._about["metadata"][name], epoch=EPOCH, token=TOKEN, num_blocks=self._case.num_blocks,
                timeout_s=TIMEOUT_S,
            )
            self._closers.append(connection.close)
            self._connections[name, checksums] = connection
        if any(name in ACROSS_HOSTS for name in transports):
            self._bare = socket.create_connection((HOST, self._about["bare_port"]))

    def turns(self) -> dict[tuple[str, bool], Turn]:
        """By (who, whether checksums are verified)."""
        turns: dict[tuple[str, bool], Turn] = {(COPY, False): self._copy}
        if self._bare is not None:
            turns[BARE_SOCKET, False] = self._receive_bare
        for key in self._connections:
            turns[key] = lambda key=key: self._fetch(*key)  # type: ignore[misc]
        return turns

    async def close(self) -> None:
        if self._bare is not None:
            self._bare.close()
        for close in reversed(self._closers):
            await close()
        self._arena.close()
        self._copied.close()

    async def _copy(self) -> None:
        source, own = (np.frombuffer(arena.buffer, dtype=np.uint8) for arena in (self._copied, self._arena))
        memcpy_pieces(source, own, self._spans.source_offsets, self._spans.offsets, self._spans.lengths)

    async def _receive_bare(self) -> None:
        assert self._bare is not None
        self._bare.sendall(b"x")
        receive_views(self._bare, views_of(self._arena.buffer, self._spans.offsets, self._spans.lengths))

    async def _fetch(self, name: str, checksums: bool) -> None:
        """One fetch for each that the transport has under way at a time, as a destination asks for several batches."""
        connection, spans = self._connections[name, checksums], self._spans
        most_bytes = -(-spans.num_bytes // AT_A_TIME.get(name, 1))
        parts = [spans.part(run) for run in runs_of(spans.lengths, most_bytes)]
        fetched = await asyncio.gather(*(connection.fetch(part, token=TOKEN, timeout_s=TIMEOUT_S) for part in parts))
        if not checksums:
            return
        sums = [each.checksums for each in fetched if each.checksums is not None]
        if not sums:
            octets = np.frombuffer(self._arena.buffer, dtype=np.uint8)
            sums = [await asyncio.to_thread(range_checksums, octets, spans.offsets, spans.lengths)]
        if not np.array_equal(np.concatenate(sums), self._checksums):
            raise DataLoss(f"{name}: what arrived has other checksums than what was sent")


async def _take_turns(
    turns: dict[tuple[str, bool], Turn], rounds: int, note: Callable[[str], None]
) -> dict[tuple[str, bool], list[float]]:
    """Seconds of every turn of every round, after one round that does not count: of the wall clock where another
    process takes part, else of this process's CPU time, which a busy host disturbs less."""
    seconds: dict[tuple[str, bool], list[float]] = {key: [] for key in turns}
    for number in range(rounds + 1):
        note("warming up" if number == 0 else f"round {number} of {rounds}")
        for key, turn in turns.items():
            clock = time.perf_counter if key[0] in ACROSS_PROCESSES else time.process_time
            began_s = clock()
            await turn()
            if number:
                seconds[key].append(clock() - began_s)
    return seconds


def _rows(
    case: MovingCase, transports: Sequence[str], seconds: dict[tuple[str, bool], list[float]]
) -> list[MovingRow]:
    return [
        moving_row(
            name, case, checksums=checksums, seconds=seconds[name, checksums],
            reference_seconds=seconds[BARE_SOCKET if name in ACROSS_HOSTS else COPY, False],
        )
        for name in transports for checksums in (False, True)
    ]
