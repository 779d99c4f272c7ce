"""What a decision says of itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pd_router import costs
from pd_router.explanation import break_even_tokens, candidates, explain
from pd_router.placement import Exclusion, Placement, Refusal, place
from pd_router.pools import PlacementRequest, Snapshot, WorkerView

REQUEST = PlacementRequest(num_tokens=100, num_prefill_blocks=7, num_decode_blocks=10, num_output_tokens=10)
IDLE = WorkerView(worker_id="", ready=True, num_blocks_free=50, num_blocks_total=100)
PREFILL = replace(IDLE, worker_id="p", num_queued_tokens=3)
DECODE = replace(IDLE, worker_id="d0", next_itl_ms=2.0)


def placed(request: PlacementRequest, snapshot: Snapshot) -> Placement:
    decision = place(request, snapshot)
    assert isinstance(decision, Placement), decision
    return decision


def test_a_placement_shows_everybodys_costs() -> None:
    pools = Snapshot(
        prefill=(PREFILL,), decode=(DECODE, replace(DECODE, worker_id="d1", ready=False)), held={"p": 2, "d0": 1}
    )
    assert explain(placed(REQUEST, pools)) == (
        "remote prefill, 71.0 ms to the first token\n"
        "prefill p: p: 73.0 ms (queue 3.0 + compute 68.0 + delay 2.0, 2 blocks cached)\n"
        "decode d0: d0: 24.4 ms (move 0.8 + stay 20.0 + hold 3.6, 1 block cached); d1: not ready"
    )


def test_a_refusal_shows_why_each_worker_is_out() -> None:
    refusal = place(REQUEST, Snapshot(prefill=(), decode=()))
    assert isinstance(refusal, Refusal)
    assert explain(refusal) == "decode: no worker is left (none exists)"
    full = replace(DECODE, num_blocks_free=9)
    refusal = place(REQUEST, Snapshot(prefill=(PREFILL,), decode=(full, replace(DECODE, worker_id="d1", ready=False))))
    assert isinstance(refusal, Refusal)
    assert explain(refusal) == "decode: no worker has room now (d0: no room now; d1: not ready)"


def test_who_was_passed_over_is_told_why() -> None:
    pools = Snapshot(
        prefill=(PREFILL, replace(PREFILL, worker_id="p1")), decode=(DECODE, replace(DECODE, worker_id="d1"))
    )
    request = replace(REQUEST, avoided=frozenset({"p"}), preferred_decode="d1")
    reasons = {c.worker_id: c.exclusion for c in candidates(placed(request, pools))}
    assert reasons == {"p": Exclusion.AVOIDED, "p1": None, "d0": Exclusion.NOT_PREFERRED, "d1": None}


def test_who_would_be_late_is_told_so() -> None:
    pools = Snapshot(prefill=(PREFILL, replace(PREFILL, worker_id="p1", num_queued_tokens=900)), decode=(DECODE,))
    request = replace(REQUEST, first_token_within_ms=200.0)
    reasons = {c.worker_id: c.exclusion for c in candidates(placed(request, pools)) if c.part == "prefill"}
    assert reasons == {"p": None, "p1": Exclusion.TOO_LATE}


def test_without_a_handoff_only_prefill_is_explained() -> None:
    placement = placed(replace(REQUEST, num_decode_blocks=0), Snapshot(prefill=(PREFILL,), decode=(DECODE,)))
    assert [c.part for c in candidates(placement)] == ["prefill"]
    assert break_even_tokens(placement) is None


@pytest.mark.parametrize(
    ("local_ms_per_token", "queued", "expected"),
    [(None, 300, None), (3.0, 300, 150.0), (3.0, 0, 0.0), (0.5, 0, math.inf)],
)
def test_where_local_prefill_breaks_even(local_ms_per_token: float | None, queued: int, expected: float | None) -> None:
    prefill = replace(PREFILL, num_queued_tokens=queued, prefill_ms_per_token=0.8)
    decode = replace(DECODE, local_prefill_ms_per_token=local_ms_per_token, move_ms_per_token=0.2)
    decode = replace(decode, num_queued_tokens=0)
    even = costs.break_even_tokens(prefill, decode)
    assert even == (None if expected is None else pytest.approx(expected * 0.8))


def test_local_prefill_is_a_candidate_where_it_is_offered() -> None:
    offering = replace(DECODE, local_prefill_ms_per_token=0.5)
    pools = Snapshot(
        prefill=(PREFILL,), decode=(offering, replace(offering, worker_id="d1", next_itl_ms=3.0)), held={"d0": 1}
    )
    placement = placed(replace(REQUEST, num_local_tokens=84), pools)
    assert explain(placement).splitlines() == [
        "local prefill, 42.0 ms to the first token",
        "prefill none: p: 106.0 ms (queue 3.0 + compute 100.0 + delay 3.0)",
        "decode none: d0: 24.4 ms (move 0.8 + stay 20.0 + hold 3.6, 1 block cached); "
        "d1: 37.0 ms (move 1.0 + stay 30.0 + hold 6.0)",
        "local d0: d0: 65.6 ms (queue 0.0 + compute 42.0 + slow 0.0 + stay 20.0 + hold 3.6, 1 block cached); "
        "d1: has too little of the prompt cached",
    ]
    named = placed(replace(REQUEST, pinned_prefill="p"), pools)
    assert {c.exclusion for c in candidates(named) if c.part == "local"} == {Exclusion.PINNED_ELSEWHERE}
    assert break_even_tokens(named) == math.inf


def test_without_a_prefill_worker_the_explanation_has_the_local_candidates() -> None:
    pools = Snapshot(prefill=(), decode=(replace(DECODE, local_prefill_ms_per_token=0.5, num_sequences=2),))
    only_token = placed(replace(REQUEST, num_decode_blocks=0), pools)
    assert explain(only_token).splitlines() == [
        "local prefill, 50.0 ms to the first token",
        "local d0: d0: 172.8 ms (queue 0.0 + compute 50.0 + slow 100.0 + stay 20.0 + hold 2.8)",
    ]
    refusal = place(REQUEST, replace(pools, decode=(replace(pools.decode[0], has_room=False),)))
    assert explain(refusal) == "local: no worker has room now (d0: no room now)"
