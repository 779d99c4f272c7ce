"""When a pool gets another size: a pure function of what was seen, of the time, and of what it decided before.

- Up, when a target has been missed for `up_after_s`: to as many as would keep it if the work were shared evenly, twice
  as many at a time at most.
- Down, when one worker fewer would have kept every target with a margin for `down_after_s`: one at a time.
- Not again for `pause_s` after a change, until its effect can be seen. Bounds stand over all, the schedule's over the
  others; a pool outside of them goes to them at once, downwards one at a time.

Between "one fewer would do" and "a target is missed" lies the margin: a steady load never moves a pool to and fro.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pd_engine.settings import AutoscaleSettings
from pd_ops.autoscale.observation import PoolLook, Pressure
from pd_ops.autoscale.schedule import Bounds

MAX_GROWTH = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolMemory:
    """What is remembered of a pool, on the caller's monotonic clock. None: not now, or never."""

    missed_since_s: float | None = None
    spare_since_s: float | None = None
    changed_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """`size` is what the pool should have; `why` says it to a person, whether it changes or not."""

    size: int
    why: str


def decide(
    pool: PoolLook, bounds: Bounds, memory: PoolMemory, settings: AutoscaleSettings, now_s: float
) -> tuple[Decision, PoolMemory]:
    """A pool's size from now on, and what to remember."""
    size, worst = pool.num_ready, pool.worst
    if not bounds.least <= size <= bounds.most:
        wanted = max(size, bounds.least) if size < bounds.least else size - 1
        why = f"{size} is outside of {bounds}"
        return Decision(size=wanted, why=why), PoolMemory(changed_s=now_s)
    memory = _remember(size, worst, memory, settings, now_s)
    if worst is None:
        return Decision(size=size, why="nothing has been measured yet"), memory
    wanted, why = _wanted(size, worst, memory, settings, now_s)
    bounded = bounds.clamp(wanted)
    if bounded != wanted:
        why = f"{why}; but {bounds}"
    if bounded == size:
        return Decision(size=size, why=why), memory
    paused_s = _left(memory.changed_s, settings.pause_s, now_s)
    if paused_s > 0:
        return Decision(size=size, why=f"{why}; the last change is waited for, {paused_s:.0f} s more"), memory
    return Decision(size=bounded, why=why), PoolMemory(changed_s=now_s)


def _wanted(
    size: int, worst: Pressure, memory: PoolMemory, settings: AutoscaleSettings, now_s: float
) -> tuple[int, str]:
    if memory.missed_since_s is not None:
        left_s = _left(memory.missed_since_s, settings.up_after_s, now_s)
        if left_s > 0:
            return size, f"{worst}: missed; up if it stays so for {left_s:.0f} s more"
        return min(math.ceil(size * worst.share), size * MAX_GROWTH), f"{worst}: missed"
    if memory.spare_since_s is not None:
        left_s = _left(memory.spare_since_s, settings.down_after_s, now_s)
        if left_s > 0:
            return size, f"{worst}: one worker fewer would do; down if it stays so for {left_s:.0f} s more"
        return size - 1, f"{worst}: one worker fewer does"
    return size, f"{worst}: kept"


def _remember(
    size: int, worst: Pressure | None, memory: PoolMemory, settings: AutoscaleSettings, now_s: float
) -> PoolMemory:
    is_missed = worst is not None and worst.share > 1
    is_spare = worst is not None and size > 1 and worst.share * size / (size - 1) < 1 - settings.margin
    return replace(
        memory,
        missed_since_s=(now_s if memory.missed_since_s is None else memory.missed_since_s) if is_missed else None,
        spare_since_s=(now_s if memory.spare_since_s is None else memory.spare_since_s) if is_spare else None,
    )


def _left(since_s: float | None, duration_s: float, now_s: float) -> float:
    return 0.0 if since_s is None else since_s + duration_s - now_s
