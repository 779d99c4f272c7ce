"""Looks at a cluster's workers, as its router sees them, many times a second; and what follows from what it saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pd_engine.contracts import api_pb2
from pd_engine.errors import PdRelayError
from pd_ops.client import router_client

INTERVAL_S = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenWorker:
    """`in_state_s`: for how long the router had found it so."""

    role: str
    is_ready: bool
    epoch: str
    in_state_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """`workers` by id; None: the router did not answer."""

    time_s: float
    workers: Mapping[str, SeenWorker] | None

    def num_ready(self) -> dict[str, int]:
        """By role."""
        counts = {"prefill": 0, "decode": 0}
        for worker in (self.workers or {}).values():
            counts[worker.role] += worker.is_ready
        return counts


class Observer:
    """Attributes:
    sightings: in order.
    """

    def __init__(self, address: str) -> None:
        self.sightings: list[Sighting] = []
        self._address = address
        self._change = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled."""
        async with router_client(self._address) as client:
            while True:
                try:
                    seen = sighting(await client.server_info(), time.monotonic())
                except PdRelayError:
                    seen = Sighting(time_s=time.monotonic(), workers=None)
                self.sightings.append(seen)
                self._change.set()
                await asyncio.sleep(INTERVAL_S)

    async def wait_sighting(self) -> None:
        """For the next one."""
        self._change.clear()
        await self._change.wait()


def sighting(info: api_pb2.GetServerInfoResponse, now_s: float) -> Sighting:
    return Sighting(time_s=now_s, workers={
        worker.id: SeenWorker(
            role=worker.role, is_ready=worker.state == "ready", epoch=worker.epoch, in_state_s=worker.state_ms / 1e3
        )
        for worker in info.workers
    })


def seen_lost(sightings: Sequence[Sighting], target: str | None, epoch: str, since_s: float) -> float | None:
    """When the target's life began to serve no more: a worker, by the router's own word unless that has another life to
    tell of by then; or the router if it is None."""
    for seen in sightings:
        if seen.time_s < since_s:
            continue
        if seen.workers is None:
            if target is None:
                return seen.time_s
            continue
        worker = seen.workers.get(target) if target is not None else None
        if target is not None and (worker is None or worker.epoch != epoch):
            return seen.time_s
        if worker is not None and not worker.is_ready:
            return max(since_s, seen.time_s - worker.in_state_s)
    return None


def seen_full(sightings: Sequence[Sighting], sizes: Mapping[str, int], since_s: float) -> float | None:
    """When both pools were first seen to have as many ready workers."""
    for seen in sightings:
        ready = seen.num_ready()
        if seen.time_s >= since_s and all(ready[role] >= size for role, size in sizes.items()):
            return seen.time_s
    return None


def falsely_lost(sightings: Sequence[Sighting], apart_from: Collection[str], since_s: float) -> list[str]:
    """Workers that nobody touched, and that were seen not to be ready or to have begun another life."""
    first: dict[str, str] = {}
    lost: set[str] = set()
    for seen in sightings:
        for worker_id, worker in (seen.workers or {}).items():
            epoch = first.setdefault(worker_id, worker.epoch)
            if seen.time_s >= since_s and (worker.epoch != epoch or not worker.is_ready):
                lost.add(worker_id)
    return sorted(lost.difference(apart_from))
