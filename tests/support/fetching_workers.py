"""Workers of which each may have what another one lacks, and routers that place on one pair of them each."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_engine.contracts import worker_pb2 as pb
from support.cluster import SECRET, ProcessWorker, worker_processes
from support.player import Player

BLOCK = 16
SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 8, "chunk_tokens": 64}, "decode": {"adaptive_speculation": False},
    "transfer": {"lease_ms": 60_000, "prefix_fetch_ms": 20_000},
}
HASTY: dict[str, Any] = {**SETTINGS, "transfer": {"lease_ms": 60_000, "prefix_fetch_ms": 300}}


@dataclass(kw_only=True)
class Workers:
    """`players` are routers: one for each pair of a prefill and a decode worker, in order."""

    prefill: list[ProcessWorker]
    decode: list[ProcessWorker]
    players: list[Player]

    async def until_idle(self) -> None:
        for player in self.players:
            await player.until_idle()


@contextlib.asynccontextmanager
async def started(
    settings: dict[str, Any], log_dir: Path, *, prefill: int = 1, decode: int = 1
) -> AsyncIterator[Workers]:
    async with worker_processes(settings, log_dir, prefill=prefill, decode=decode) as (prefills, decodes):
        players = [Player(one.address, other.address, SECRET) for one in prefills for other in decodes]
        for player in players:
            await player.open()
        yield Workers(prefill=prefills, decode=decodes, players=players)
        for player in players:
            await player.close()


def holder(worker: ProcessWorker, num_tokens: int) -> pb.PrefixHolder:
    return pb.PrefixHolder(address=worker.address, epoch=worker.epoch, num_blocks=num_tokens // BLOCK)
