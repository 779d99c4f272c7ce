"""Placement and admission: pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_engine.errors import ResourceExhausted
from pd_router.admission import MAX_RETRY_MS, MIN_RETRY_MS, Admission
from pd_router.placement import (
    Exclusion,
    Placement,
    PlacementRequest,
    Refusal,
    RefusalKind,
    Snapshot,
    WorkerView,
    place,
)

REQUEST = PlacementRequest(num_tokens=100, num_prefill_blocks=7, num_decode_blocks=10)


def worker(worker_id: str, **fields: object) -> WorkerView:
    return replace(
        WorkerView(worker_id=worker_id, ready=True, num_blocks_free=50, num_blocks_total=100),
        **fields,  # type: ignore[arg-type]
    )


def snapshot(prefill: list[WorkerView], decode: list[WorkerView]) -> Snapshot:
    return Snapshot(prefill=tuple(prefill), decode=tuple(decode))


def placed(decision: Placement | Refusal) -> tuple[str, str | None]:
    assert isinstance(decision, Placement), decision
    return decision.prefill_worker, decision.decode_worker


def refused(decision: Placement | Refusal) -> tuple[str, RefusalKind]:
    assert isinstance(decision, Refusal), decision
    return decision.role, decision.kind


def test_the_least_loaded_of_both_pools() -> None:
    pools = snapshot(
        [worker("p0", num_queued_tokens=500), worker("p1", num_queued_tokens=20)],
        [worker("d0", num_sequences=1), worker("d1", num_sequences=3)],
    )
    assert placed(place(REQUEST, pools)) == ("p1", "d0")


def test_of_equals_the_one_with_more_room_then_by_name() -> None:
    decode = [worker("d1"), worker("d0"), worker("d2", num_blocks_free=60)]
    assert placed(place(REQUEST, snapshot([worker("p")], decode)))[1] == "d2"
    assert placed(place(REQUEST, snapshot([worker("p")], decode[:2])))[1] == "d0"


def test_pins_are_honoured_and_an_unknown_one_is_refused() -> None:
    pools = snapshot([worker("p0"), worker("p1", num_queued_tokens=9)], [worker("d0"), worker("d1", num_sequences=9)])
    pinned = replace(REQUEST, pinned_prefill="p1", pinned_decode="d1")
    assert placed(place(pinned, pools)) == ("p1", "d1")
    assert refused(place(replace(REQUEST, pinned_prefill="p9"), pools)) == ("prefill", RefusalKind.UNKNOWN)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"ready": False}, RefusalKind.NO_WORKER),
        ({"num_blocks_free": 9}, RefusalKind.NO_ROOM),
        ({"has_room": False}, RefusalKind.NO_ROOM),
        ({"num_blocks_total": 9, "num_blocks_free": 9}, RefusalKind.NEVER),
    ],
)
def test_why_a_decode_worker_is_out(fields: dict[str, object], kind: RefusalKind) -> None:
    pools = snapshot([worker("p")], [worker("d", **fields)])
    assert refused(place(REQUEST, pools)) == ("decode", kind)
    pools = snapshot([worker("p")], [worker("d", **fields), worker("d1", num_sequences=99)])
    assert placed(place(REQUEST, pools)) == ("p", "d1")


def test_an_empty_pool_and_one_that_is_too_small_for_now() -> None:
    assert refused(place(REQUEST, snapshot([], [worker("d")]))) == ("prefill", RefusalKind.NONE_LEFT)
    small = worker("d0", num_blocks_total=9, num_blocks_free=9)
    pools = snapshot([worker("p")], [small, worker("d1", ready=False)])
    assert refused(place(REQUEST, pools)) == ("decode", RefusalKind.NO_WORKER)  # a larger one may come back


def test_without_a_handoff_no_decode_worker_is_asked_for() -> None:
    assert placed(place(replace(REQUEST, num_decode_blocks=0), snapshot([worker("p")], []))) == ("p", None)


def test_a_worker_that_failed_is_the_last_resort() -> None:
    pools = snapshot([worker("p0"), worker("p1", num_queued_tokens=10**6)], [worker("d")])
    avoiding = replace(REQUEST, avoided=frozenset({"p0", "d"}))
    assert placed(place(avoiding, pools)) == ("p1", "d")


def test_the_decode_worker_that_holds_verified_blocks_is_preferred() -> None:
    pools = snapshot([worker("p")], [worker("d0"), worker("d1", num_sequences=50)])
    assert placed(place(replace(REQUEST, preferred_decode="d1"), pools)) == ("p", "d1")


def test_a_decision_explains_itself() -> None:
    pools = snapshot([worker("p", num_queued_tokens=3)], [worker("d0", num_sequences=2), worker("d1", ready=False)])
    decision = place(REQUEST, pools)
    assert isinstance(decision, Placement)
    assert decision.explain() == "prefill p: p: cost 3\ndecode d0: d0: cost 2; d1: not ready"
    refusal = place(REQUEST, snapshot([], []))
    assert isinstance(refusal, Refusal)
    assert refusal.explain() == "decode: no worker is left (none exists)"


VIEWS = st.lists(
    st.builds(
        WorkerView,
        worker_id=st.sampled_from("abcdef"),
        ready=st.booleans(),
        has_room=st.booleans(),
        num_queued_tokens=st.integers(0, 50),
        num_sequences=st.integers(0, 50),
        num_blocks_free=st.integers(0, 30),
        num_blocks_total=st.just(30),
    ),
    max_size=6,
    unique_by=lambda view: view.worker_id,
)


@given(prefill=VIEWS, decode=VIEWS, avoided=st.frozensets(st.sampled_from("abcdef")), pinned=st.sampled_from(["", "a"]))
def test_a_placement_is_possible_and_nobody_better_was_passed_over(
    prefill: list[WorkerView], decode: list[WorkerView], avoided: frozenset[str], pinned: str
) -> None:
    request = replace(REQUEST, avoided=avoided, pinned_decode=pinned)
    decision = place(request, snapshot(prefill, decode))
    fits = [
        view
        for view in decode
        if view.ready and view.has_room and view.num_blocks_free >= 10 and pinned in ("", view.worker_id)
    ]
    if isinstance(decision, Refusal):
        fits_prefill = [v for v in prefill if v.ready and v.has_room and v.num_blocks_free >= 7]
        assert not fits or not fits_prefill
        return
    [chosen] = [view for view in decode if view.worker_id == decision.decode_worker]
    assert chosen in fits
    better = [view for view in fits if view.num_sequences < chosen.num_sequences and view.worker_id not in avoided]
    assert not better
    excluded = [c.worker.worker_id for c in decision.decode_candidates if c.exclusion is Exclusion.AVOIDED]
    assert set(excluded) <= avoided


def test_admission_refuses_the_one_too_many_with_a_hint() -> None:
    admission = Admission(max_running_requests=2)
    admission.admit(1)
    with pytest.raises(ResourceExhausted, match="at most 2 are allowed") as caught:
        admission.admit(2)
    assert caught.value.retry_after_ms == MIN_RETRY_MS
    for _ in range(100):
        admission.note_end(4_000)
    assert admission.retry_after_ms() == 2_000
    for _ in range(100):
        admission.note_end(10**9)
    assert admission.retry_after_ms() == MAX_RETRY_MS


def test_workers_that_have_ended_are_not_waited_for() -> None:
    ended = WorkerView(worker_id="e", ready=False, expected=False)
    away = WorkerView(worker_id="a", ready=False)
    here = [worker("d")]
    assert refused(place(REQUEST, snapshot([ended], here))) == ("prefill", RefusalKind.NONE_LEFT)
    assert refused(place(REQUEST, snapshot([ended, away], here))) == ("prefill", RefusalKind.NO_WORKER)
    assert refused(place(REQUEST, snapshot([worker("p")], [ended]))) == ("decode", RefusalKind.NONE_LEFT)
