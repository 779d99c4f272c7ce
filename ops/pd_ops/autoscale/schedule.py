"""Bounds of a pool, by the time of day. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import time

from pd_engine.settings import AutoscaleSettings, SchedulePeriod


@dataclass(frozen=True, slots=True)
class Bounds:
    least: int
    most: int

    def clamp(self, size: int) -> int:
        return min(max(size, self.least), self.most)

    def __str__(self) -> str:
        return f"{self.least} to {self.most} workers are allowed now"


def bounds_at(pool: str, settings: AutoscaleSettings, at: time) -> Bounds:
    """Of "prefill" or "decode". The first period that the time is in counts, for the bounds that it names. The least
    stands over the most."""
    least, most = _bounds_of(pool, settings)
    period = next((period for period in settings.schedule if is_within(period, at)), None)
    if period is not None:
        other_least, other_most = _bounds_of(pool, period)
        least = least if other_least is None else other_least
        most = most if other_most is None else other_most
    assert least is not None and most is not None, "the settings have both"
    return Bounds(least, max(least, most))


def _bounds_of(pool: str, named: AutoscaleSettings | SchedulePeriod) -> tuple[int | None, int | None]:
    if pool == "prefill":
        return named.prefill_least, named.prefill_most
    return named.decode_least, named.decode_most


def is_within(period: SchedulePeriod, at: time) -> bool:
    """From its beginning up to its end, which may be on the next day; the same time twice: always."""
    begin, end = time.fromisoformat(period.begin), time.fromisoformat(period.end)
    if begin < end:
        return begin <= at < end
    return at >= begin or at < end
