"""A counter and a histogram without locks, for what is noted with every step of every stream, in one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class TallyCounter(Collector):
    """Args:
    labels: of its one sample.
    """

    def __init__(self, name: str, documentation: str, labels: dict[str, str]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self.total = 0

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.total)
        yield family


class TallyHistogram(Collector):
    """Args:
    labels: of all its samples.
    bounds: upper ones, rising; above the last one is +Inf.
    """

    def __init__(self, name: str, documentation: str, labels: dict[str, str], bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        buckets, total = [], 0
        for bound, count in zip([*map(float, self._bounds), float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family.add_metric(list(self._labels.values()), buckets=buckets, sum_value=self._sum)
        yield family
