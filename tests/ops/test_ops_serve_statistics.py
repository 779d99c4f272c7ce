"""Percentiles, goodput at its edges, buckets and seconds of a measurement's records."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pd_ops.bench.serve.record import Outcome, Record
from pd_ops.bench.serve.summary import ItlOf, Spread, Targets, percentile, series, summarize


def record(**fields: Any) -> Record:
    """Due at 0, finished at 1 s, tokens at 100, 150 and 200 ms."""
    standard: dict[str, Any] = {
        "number": 0, "kind": "x", "intended_s": 0.0, "sent_s": 0.0, "end_s": 1.0, "outcome": Outcome.FINISHED,
        "prompt_tokens": 10, "asked_tokens": 3, "arrivals": ((0.1, 1), (0.15, 1), (0.2, 1)),
    }
    return Record(**(standard | fields))


def test_percentiles_are_linear_between_ranks() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0, 5.0], share) for share in (0, 0.25, 0.5, 0.9, 1)] == [1, 2, 3, 4.6, 5]
    assert percentile([7.0], 0.99) == 7
    assert percentile([1.0, 1001.0], 0.99) == pytest.approx(991)
    spread = Spread.of(range(101))
    assert (spread.count, spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.most) == (
        101, 50, 50, 90, 95, 99, 100,
    )
    assert Spread.of([]) == Spread(count=0)


def test_order_of_samples_does_not_matter() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread.of([1.0, 2.0, 3.0])


@pytest.mark.parametrize(("targets", "good"), [
    (Targets(), True),
    (Targets(ttft_ms=100.0), True),                    # exactly met
    (Targets(ttft_ms=math.nextafter(100.0, 0)), False),
    (Targets(itl_ms=50.0 + 1e-9), True),
    (Targets(itl_ms=49.9), False),
    (Targets(ttft_ms=1000.0, itl_ms=1.0), False),      # one of two is not enough
])
def test_a_request_is_good_if_it_met_all_targets(targets: Targets, good: bool) -> None:
    assert targets.are_met(record()) is good


@pytest.mark.parametrize(("of", "good"), [(ItlOf.MEAN, True), (ItlOf.P99, False), (ItlOf.MAX, False)])
def test_which_time_between_tokens_counts(of: ItlOf, good: bool) -> None:
    arrivals = tuple((0.1 + 0.01 * index, 1) for index in range(50))
    stalled = record(arrivals=(*arrivals, (1.5, 1)))
    assert Targets(itl_ms=50.0, itl_of=of).are_met(stalled) is good


def test_what_is_never_good() -> None:
    anything = Targets()
    for outcome in (Outcome.REFUSED, Outcome.FAILED, Outcome.UNFINISHED):
        assert not anything.are_met(record(outcome=outcome))
    assert not anything.are_met(record(arrivals=()))  # finished without a token


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    assert Targets(ttft_ms=100.0, itl_ms=0.0).are_met(record(arrivals=((0.1, 1),)))
    assert Targets(ttft_ms=100.0, itl_ms=0.0).are_met(record(arrivals=((0.1, 3),)))  # nor have tokens that came at once


def test_latency_counts_from_when_a_request_was_due() -> None:
    """Coordinated omission: what a stalled endpoint kept from being sent was late all the same."""
    late = record(intended_s=1.0, sent_s=9.0, end_s=9.5, arrivals=((9.1, 1),))
    assert late.timing.ttft_ms == pytest.approx(8100)
    assert late.lag_ms == pytest.approx(8000)
    assert not Targets(ttft_ms=1000.0).are_met(late)
    summary = summarize([late], Targets(ttft_ms=1000.0), span_s=10.0)
    assert summary["ttft_ms"]["p50"] == pytest.approx(8100)
    assert summary["request_ms"]["p50"] == pytest.approx(8500)


def test_tokens_that_came_together_share_their_time() -> None:
    assert record(arrivals=((0.1, 1), (0.2, 2))).timing.itl_ms == pytest.approx([50, 50])


def test_summary() -> None:
    records = [
        record(number=0, num_cached_tokens=4, num_drafted=10, num_accepted=6, handoff_bytes=100, hidden_bytes=90,
               queue_ms=5.0),
        record(number=1, arrivals=((0.9, 1),), prompt_tokens=300, num_cached_tokens=0, asked_tokens=1),
        record(number=2, outcome=Outcome.REFUSED, arrivals=(), error="no room"),
        record(number=3, outcome=Outcome.FAILED, arrivals=((0.1, 1),), error="worker died"),
        record(number=4, outcome=Outcome.UNFINISHED),
    ]
    found = summarize(records, Targets(ttft_ms=500.0), span_s=2.0)
    assert {name: found[name] for name in ("requests", "finished", "refused", "failed", "unfinished", "good")} == {
        "requests": 5, "finished": 2, "refused": 1, "failed": 1, "unfinished": 1, "good": 1,
    }
    assert (found["goodput_per_s"], found["good_share"]) == (0.5, 0.2)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (310, 4)  # of what finished
    assert (found["good_prompt_tokens"], found["good_completion_tokens"]) == (10, 3)
    assert (found["drafted_tokens"], found["accepted_tokens"], found["cached_tokens"]) == (10, 6, 4)
    assert found["ttft_ms"]["count"] == 2  # neither the failed nor the unfinished one
    assert found["errors"] == [{"error": "no room", "count": 1}, {"error": "worker died", "count": 1}]
    assert found["handoff"]["exposed_bytes"]["most"] == 10
    assert found["queue_ms"]["count"] == 1
    assert [(row["above"], row["up_to"], row["requests"], row["good"]) for row in found["by_prompt_tokens"]] == [
        (0, 64, 4, 1), (256, 1024, 1, 0),
    ]
    assert [row["handoff"]["count"] for row in found["by_prompt_tokens"]] == [1, 0]
    assert sum(row["requests"] for row in found["by_completion_tokens"]) == 5
    assert sum(row["refused"] for row in found["by_context_tokens"]) == 1


def test_a_handoff_shows_in_the_second_token() -> None:
    arrivals = ((0.1, 1), (0.5, 1), (0.6, 1), (0.7, 1), (0.9, 1))
    moved = record(number=0, arrivals=arrivals, handoff_bytes=100)
    assert moved.handoff_wait_ms == pytest.approx(300)  # a usual gap is 100
    assert record(arrivals=arrivals).handoff_wait_ms is None  # there was none
    assert record(arrivals=arrivals[:3], handoff_bytes=100).handoff_wait_ms is None  # nothing tells what is usual
    early = record(arrivals=((0.1, 1), (0.11, 1), (0.3, 1), (0.5, 1)), handoff_bytes=100)
    assert early.handoff_wait_ms == 0
    found = summarize([moved, early], Targets(), span_s=1.0)
    assert (found["handoff"]["wait_ms"]["count"], found["handoff"]["wait_ms"]["most"]) == (2, pytest.approx(300))


def test_what_the_endpoint_counts_stands_over_chunks_that_were_seen() -> None:
    """Chunks of several tokens, as endpoints without token ids send them."""
    seen = record(asked_tokens=9, arrivals=((0.1, 1), (0.2, 1)))
    assert (seen.completion_tokens, seen.is_short) == (2, False)  # chunks tell nothing of lengths
    whole, short = (replace(seen, num_told_tokens=count) for count in (9, 4))
    assert (whole.completion_tokens, whole.is_short) == (9, False)
    assert (short.completion_tokens, short.is_short) == (4, True)
    found = summarize([whole, short, replace(short, outcome=Outcome.FAILED)], Targets(), span_s=1.0)
    assert (found["completion_tokens"], found["short"]) == (13, 1)


def test_edges_belong_to_the_bucket_below() -> None:
    rows = summarize([record(prompt_tokens=tokens) for tokens in (64, 65, 70_000)], Targets(), span_s=1.0)
    assert [(row["above"], row["up_to"]) for row in rows["by_prompt_tokens"]] == [(0, 64), (64, 256), (65_536, None)]


def test_nothing_measured_is_no_error() -> None:
    found = summarize([], Targets(), span_s=0.0)
    assert (found["goodput_per_s"], found["good_share"], found["cached_tokens"]) == (0.0, 0.0, None)
    assert found["ttft_ms"]["p50"] is None


def test_unknown_is_not_none() -> None:
    """An endpoint that says nothing of its cache has no hit rate; one that says 0 has one of 0."""
    assert summarize([record()], Targets(), span_s=1.0)["cached_share"] is None
    assert summarize([record(num_cached_tokens=0)], Targets(), span_s=1.0)["cached_share"] == 0


def test_seconds() -> None:
    records = [
        record(intended_s=0.2, sent_s=0.2, end_s=2.5, arrivals=((0.9, 1), (1.1, 2), (2.4, 1))),
        record(intended_s=1.0, sent_s=1.0, end_s=1.0, outcome=Outcome.REFUSED, arrivals=()),
        record(intended_s=2.1, sent_s=2.1, end_s=2.2, outcome=Outcome.FAILED, arrivals=()),
    ]
    rows = series(records, 2.5)
    assert [row["tokens"] for row in rows] == [1, 2, 1]
    assert [row["intended"] for row in rows] == [1, 1, 1]
    assert [row["finished"] for row in rows] == [0, 0, 1]
    assert [row["refused"] for row in rows] == [0, 1, 0]
    assert [row["failed"] for row in rows] == [0, 0, 1]
    assert [row["running"] for row in rows] == [1, 1, 0]
    assert len(series([], 0.0)) == 1
