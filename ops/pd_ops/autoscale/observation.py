"""What the policy looks at: how hard each pool works, as a share of what its targets allow. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pd_engine.contracts import api_pb2
from pd_engine.settings import AutoscaleSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """One thing that is measured against its target; `share` above 1: it is missed."""

    name: str
    value: float
    target: float
    unit: str

    @property
    def share(self) -> float:
        return self.value / self.target

    def __str__(self) -> str:
        return f"{self.name} {self.value:.0f}{self.unit}, target {self.target:g}{self.unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLook:
    """A pool at one moment: how many workers take requests, and what was measured of it."""

    num_ready: int
    pressures: tuple[Pressure, ...]

    @property
    def worst(self) -> Pressure | None:
        """None: nothing was measured."""
        return max(self.pressures, key=lambda pressure: pressure.share, default=None)


def look(
    loads: Sequence[api_pb2.WorkerLoad], *, num_in_line: int, targets: AutoscaleSettings
) -> dict[str, PoolLook]:
    """Both pools. Requests that wait in line at the router wait for blocks, mostly, so they count for the decode pool:
    its cache counts as full."""
    prefill = [load for load in loads if load.role == "prefill"]
    decode = [load for load in loads if load.role == "decode"]
    return {
        "prefill": PoolLook(num_ready=len(prefill), pressures=tuple(_of_prefill(prefill, targets))),
        "decode": PoolLook(num_ready=len(decode), pressures=tuple(_of_decode(decode, num_in_line, targets))),
    }


def _of_prefill(loads: Sequence[api_pb2.WorkerLoad], targets: AutoscaleSettings) -> list[Pressure]:
    """The time that what waits would take all of them together. Speeds that nobody has measured say nothing."""
    speed = sum(load.prefill_tokens_per_s for load in loads)
    num_queued = sum(load.queued_prefill_tokens for load in loads)
    if not loads or not speed > 0:
        return []
    queue_ms = num_queued / speed * 1000
    return [Pressure(name="prefill queue", value=queue_ms, target=targets.queue_ms, unit=" ms")]


def _of_decode(
    loads: Sequence[api_pb2.WorkerLoad], num_in_line: int, targets: AutoscaleSettings
) -> list[Pressure]:
    num_blocks = sum(load.num_blocks_total for load in loads)
    if not num_blocks:
        return []
    used = 1 - sum(load.num_blocks_free for load in loads) / num_blocks
    pressures = [
        Pressure(
            name="blocks in use", value=100 if num_in_line else 100 * used, target=100 * targets.cache_share, unit=" %"
        )
    ]
    itl_ms = [load.itl_ms for load in loads if load.num_running and load.itl_ms > 0 and math.isfinite(load.itl_ms)]
    if itl_ms:
        mean_ms = sum(itl_ms) / len(itl_ms)
        pressures.append(Pressure(name="between tokens", value=mean_ms, target=targets.itl_ms, unit=" ms"))
    return pressures
