"""When a process that has died is started again: at once the first time, then later and later. Pure.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

STABLE_S = 60.0  # a process that has served so long has earned a fresh start
MAX_HOPEFUL_FAILURES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """`first_delay_s` before the second start in a row, doubled for each further one, `max_delay_s` at most."""

    first_delay_s: float
    max_delay_s: float


class RestartPacer:
    """Paces the starts of one process."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_in_row = 0  # ends and failed starts since it last served for long
        self._num_failed_starts = 0
        self._serving_since_s: float | None = None

    def note_serving(self, now_s: float) -> None:
        self._num_failed_starts = 0
        self._serving_since_s = now_s

    def next_delay_s(self, now_s: float) -> float:
        """To be asked once for each end and each failed start: how long to wait before the next start."""
        since_s, self._serving_since_s = self._serving_since_s, None
        if since_s is None:
            self._num_failed_starts += 1
        elif now_s - since_s >= STABLE_S:
            self._num_in_row = 0
        self._num_in_row += 1
        if self._num_in_row == 1:
            return 0.0
        doublings = min(self._num_in_row - 2, 32)  # beyond any maximum
        return min(self._policy.max_delay_s, self._policy.first_delay_s * float(1 << doublings))

    @property
    def is_hopeful(self) -> bool:
        """Whether requests should wait for it: not once it has failed to start again and again."""
        return self._num_failed_starts < MAX_HOPEFUL_FAILURES
