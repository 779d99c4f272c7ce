"""Who is let in. Pure: the clock and the count are arguments."""

from __future__ import annotations

from dataclasses import dataclass

from pd_engine.errors import ResourceExhausted
from pd_router.placement import Placement

MIN_RETRY_MS = 100
MAX_RETRY_MS = 10_000
_WEIGHT = 0.1  # of the newest duration in the moving average


class Admission:
    """Refuses what exceeds the most requests at once, with a hint when one is likely to have ended."""

    def __init__(self, *, max_running_requests: int) -> None:
        self._max_running = max_running_requests
        self._mean_duration_ms: float | None = None

    def admit(self, num_running: int, num_more: int = 1) -> None:
        """Raises:
        ResourceExhausted: the system has no room for `num_more`.
        """
        if num_running + num_more > self._max_running:
            raise ResourceExhausted(
                f"{num_running} requests are running; at most {self._max_running} are allowed at once",
                retry_after_ms=self.retry_after_ms(),
            )

    def note_end(self, duration_ms: float) -> None:
        mean = self._mean_duration_ms
        self._mean_duration_ms = duration_ms if mean is None else mean + _WEIGHT * (duration_ms - mean)

    def retry_after_ms(self) -> int:
        """The mean time between two ends when the system is full, within bounds."""
        mean_ms = self._mean_duration_ms or 0.0
        return _bounded_ms(mean_ms / self._max_running)


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftTarget:
    """When a request's first token is due: so long after `begun_s`, of the caller's monotonic clock."""

    target_ms: float
    begun_s: float

    def remaining_s(self, now_s: float) -> float:
        return self.begun_s + self.target_ms / 1000 - now_s

    def check(self, placement: Placement, now_s: float) -> None:
        """Refuses what would only be late. A placement is late only if no other one would be in time.

        Raises:
            ResourceExhausted: with a hint when the queue ahead will be short enough.
        """
        late_ms = placement.ttft_ms - 1000 * self.remaining_s(now_s)
        if late_ms > 0:
            raise ResourceExhausted(
                f"the first token would come after about {self.target_ms + late_ms:.0f} ms; the target is "
                f"{self.target_ms:g} ms",
                retry_after_ms=_bounded_ms(late_ms),
            )

    def missed(self) -> ResourceExhausted:
        """For a request that found no room in time."""
        return ResourceExhausted(
            f"no worker has had room within {self.target_ms:g} ms, the target for the first token",
            retry_after_ms=_bounded_ms(self.target_ms),
        )


def _bounded_ms(milliseconds: float) -> int:
    return round(min(max(milliseconds, MIN_RETRY_MS), MAX_RETRY_MS))
