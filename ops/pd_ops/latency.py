"""Latencies of streams, and their percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySummary:
    """Milliseconds; None without a sample."""

    p50_ms: float | None
    p99_ms: float | None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTiming:
    """When a stream's tokens came, seconds on one clock: `arrivals` has (time, tokens that came with it)."""

    start: float
    arrivals: tuple[tuple[float, int], ...]

    @property
    def ttft_ms(self) -> float | None:
        """From the request to its first token."""
        return 1e3 * (self.arrivals[0][0] - self.start) if self.arrivals else None

    @property
    def itl_ms(self) -> list[float]:
        """Time a token after the first: tokens that came together share the time since the arrival before."""
        return [
            1e3 * (time - previous) / num_tokens
            for (previous, _), (time, num_tokens) in zip(self.arrivals, self.arrivals[1:], strict=False)
            for _ in range(num_tokens)
        ]


def summarize(samples_ms: Sequence[float]) -> LatencySummary:
    """Median and 99th percentile, linear between ranks."""
    if not samples_ms:
        return LatencySummary(p50_ms=None, p99_ms=None)
    if len(samples_ms) == 1:
        return LatencySummary(p50_ms=samples_ms[0], p99_ms=samples_ms[0])
    percentiles = statistics.quantiles(samples_ms, n=100, method="inclusive")
    return LatencySummary(p50_ms=percentiles[49], p99_ms=percentiles[98])
