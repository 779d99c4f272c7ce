"""Who is let in. Pure: the clock and the count are arguments."""

from __future__ import annotations

from pd_engine.errors import ResourceExhausted

MIN_RETRY_MS = 100
MAX_RETRY_MS = 10_000
_WEIGHT = 0.1  # of the newest duration in the moving average


class Admission:
    """Refuses what exceeds the most requests at once, with a hint when one is likely to have ended."""

    def __init__(self, *, max_running_requests: int) -> None:
        self._max_running = max_running_requests
        self._mean_duration_ms: float | None = None

    def admit(self, num_running: int) -> None:
        """Raises:
        ResourceExhausted: the system is full.
        """
        if num_running >= self._max_running:
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
        return round(min(max(mean_ms / self._max_running, MIN_RETRY_MS), MAX_RETRY_MS))
