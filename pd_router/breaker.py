"""Whether journeys are sent to a worker: a circuit breaker. Pure: the clock is an argument.

A worker may be alive, report as ever, and yet fail whatever is sent to it. After some failures in a row nothing is sent
there for a while (open); then one journey is let through (half open), and what becomes of it decides. Each time that it
opens again it stays so for longer. Times are drawn at random within a factor of two, so that routers do not come back
together.
"""

from __future__ import annotations

import random
from enum import Enum

FAILURES_IN_A_ROW = 3
MIN_OPEN_S = 0.5
MAX_OPEN_S = 30.0


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


def jittered_s(seconds: float, rng: random.Random) -> float:
    """Between half of it and all of it."""
    return seconds * rng.uniform(0.5, 1.0)


class Breaker:
    """Of one life of one worker."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_failures = 0
        self._open_s = MIN_OPEN_S
        self._until_s = 0.0
        self._is_open = False
        self._probe: str | None = None

    @property
    def is_open(self) -> bool:
        """Or half open."""
        return self._is_open

    def state(self, now_s: float) -> BreakerState:
        """Half open: the next journey is the probe, or one is under way."""
        if not self._is_open:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._until_s else BreakerState.HALF_OPEN

    def takes_work(self, now_s: float) -> bool:
        """Whether another journey may be sent there."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe is None)

    def opens_in_s(self, now_s: float) -> float:
        """Until a probe is let through; 0: nothing is in its way."""
        return max(0.0, self._until_s - now_s) if self._is_open else 0.0

    def note_sent(self, journey_id: str, now_s: float) -> None:
        """A journey goes there."""
        if self.state(now_s) is BreakerState.HALF_OPEN and self._probe is None:
            self._probe = journey_id

    def note_success(self, journey_id: str) -> None:
        """The worker has done what a journey wanted of it. While it is not closed only the probe counts: others were
        sent before."""
        if self._is_open and journey_id != self._probe:
            return
        self._is_open = False
        self._probe = None
        self._num_failures = 0
        self._open_s = MIN_OPEN_S

    def note_failure(self, journey_id: str, now_s: float) -> None:
        """A journey's attempt has failed, and it is laid to this worker. A lack of room is no failure."""
        if self._is_open:
            if journey_id == self._probe:
                self._open_s = min(2 * self._open_s, MAX_OPEN_S)
                self._open(now_s)
            return
        self._num_failures += 1
        if self._num_failures >= FAILURES_IN_A_ROW:
            self._open(now_s)

    def note_gone(self, journey_id: str) -> None:
        """A journey has left without telling whether the worker works; another one may be the probe."""
        if journey_id == self._probe:
            self._probe = None

    def _open(self, now_s: float) -> None:
        self._is_open = True
        self._probe = None
        self._until_s = now_s + jittered_s(self._open_s, self._rng)
