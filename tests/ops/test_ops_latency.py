from __future__ import annotations

import pytest

from pd_ops.latency import LatencySummary, StreamTiming, summarize


def test_percentiles_are_linear_between_ranks() -> None:
    summary = summarize([float(value) for value in range(101)])
    assert summary == LatencySummary(p50_ms=50.0, p99_ms=99.0)
    assert summarize([1.0, 2.0]).p50_ms == 1.5


def test_one_sample_and_none() -> None:
    assert summarize([7.0]) == LatencySummary(p50_ms=7.0, p99_ms=7.0)
    assert summarize([]).to_json() == {"p50_ms": None, "p99_ms": None}


def test_tokens_that_came_together_share_their_time() -> None:
    timing = StreamTiming(start=1.0, arrivals=((1.5, 1), (1.7, 2), (1.8, 1)))
    assert timing.ttft_ms == pytest.approx(500)
    assert timing.itl_ms == pytest.approx([100, 100, 100])


def test_a_stream_without_tokens() -> None:
    timing = StreamTiming(start=1.0, arrivals=())
    assert timing.ttft_ms is None
    assert timing.itl_ms == []
