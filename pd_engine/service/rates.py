"""Measured rates, smoothed: what a worker tells the router of its speed."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest step


class Rate:
    """Amount per second, an exponential moving average over both: long steps count for more. 0: not yet measured."""

    def __init__(self, weight: float = WEIGHT) -> None:
        self._weight = weight
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One more measurement."""
        self._amount += self._weight * (amount - self._amount)
        self._seconds += self._weight * (seconds - self._seconds)

    @property
    def value(self) -> float:
        return self._amount / self._seconds if self._seconds > 0 else 0.0
