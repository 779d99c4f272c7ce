"""Percentiles of very many times without keeping them: counts by logarithm, right to one part in a hundred."""

from __future__ import annotations

import math
from collections import Counter

RESOLUTION = 0.01


class Histogram:
    """Of values above 0; smaller ones than a millionth count as that."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._scale = 1 / math.log1p(RESOLUTION)
        self.count = 0
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[round(math.log(max(value, 1e-6)) * self._scale)] += count
        self.count += count
        self.total += value * count

    def merge(self, other: Histogram) -> None:
        self._counts.update(other._counts)
        self.count += other.count
        self.total += other.total

    def percentile(self, share: float) -> float | None:
        """None: there is no value."""
        if not self.count:
            return None
        wanted, passed = share * self.count, 0
        for key in sorted(self._counts):
            passed += self._counts[key]
            if passed >= wanted:
                return math.exp(key / self._scale)
        raise AssertionError((share, self.count))
