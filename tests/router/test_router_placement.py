"""Placement and admission: pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pd_router.explanation import candidates, explain
from pd_router.placement import (
    Placement,
    PrefillKind,
    Refusal,
    RefusalKind,
    place,
)
from pd_router.pools import PlacementRequest, PrefixOffer, Snapshot, WorkerView

REQUEST = PlacementRequest(num_tokens=100, num_prefill_blocks=7, num_decode_blocks=10)


def worker(worker_id: str, **fields: object) -> WorkerView:
    return replace(
        WorkerView(worker_id=worker_id, ready=True, num_blocks_free=50, num_blocks_total=100),
        **fields,  # type: ignore[arg-type]
    )


def snapshot(
    prefill: list[WorkerView], decode: list[WorkerView], held: dict[str, int] | None = None
) -> Snapshot:
    return Snapshot(prefill=tuple(prefill), decode=tuple(decode), held=held or {})


def placed(decision: Placement | Refusal) -> tuple[str, str | None]:
    assert isinstance(decision, Placement), decision
    return decision.prefill_worker, decision.decode_worker


def refused(decision: Placement | Refusal) -> tuple[str, RefusalKind]:
    assert isinstance(decision, Refusal), decision
    return decision.role, decision.kind


def test_the_cheapest_of_both_pools() -> None:
    pools = snapshot(
        [worker("p0", num_queued_tokens=500), worker("p1", num_queued_tokens=20)],
        [worker("d0", next_itl_ms=11.0), worker("d1", next_itl_ms=19.0)],
    )
    assert placed(place(REQUEST, pools)) == ("p1", "d0")


def test_speed_outweighs_a_queue() -> None:
    pools = snapshot(
        [worker("p0", num_queued_tokens=900, prefill_ms_per_token=0.1), worker("p1", prefill_ms_per_token=1.1)],
        [worker("d")],
    )
    decision = place(REQUEST, pools)
    assert placed(decision) == ("p0", "d")
    assert isinstance(decision, Placement)
    assert decision.ttft_ms == pytest.approx((900 + 100) * 0.1)


@pytest.mark.parametrize(("num_queued", "chosen"), [(79, "p0"), (132, "p0"), (134, "p1")])
def test_a_cached_prefix_is_worth_its_tokens_and_what_others_are_spared(num_queued: int, chosen: str) -> None:
    """80 of 100 tokens are cached at p0. There it costs its queue + 20, and 0.2 of the mean queue; elsewhere 100 and
    all of it: they are equal at a queue of 80 / 0.6."""
    pools = snapshot([worker("p0", num_queued_tokens=num_queued), worker("p1")], [worker("d")], held={"p0": 5})
    assert placed(place(REQUEST, pools))[0] == chosen


def test_who_would_be_late_is_passed_over_if_another_one_is_not() -> None:
    pools = snapshot([worker("p0", num_queued_tokens=120), worker("p1")], [worker("d")], held={"p0": 5})
    assert placed(place(REQUEST, pools))[0] == "p0"
    assert placed(place(replace(REQUEST, first_token_within_ms=139.0), pools))[0] == "p1"
    assert placed(place(replace(REQUEST, first_token_within_ms=140.0), pools))[0] == "p0"
    assert placed(place(replace(REQUEST, first_token_within_ms=99.0), pools))[0] == "p0"  # both are late


FETCH = replace(REQUEST, num_tokens=1_000, num_prefill_blocks=63, num_decode_blocks=70)


def fetching(*prefill: WorkerView, held: dict[str, int], decode: WorkerView | None = None) -> Placement:
    pools = snapshot(
        [replace(each, num_blocks_total=100) for each in prefill], [decode or worker("d", num_blocks_free=100)], held
    )
    decision = place(FETCH, replace(pools, can_fetch=True))
    assert isinstance(decision, Placement), decision
    return decision


def test_an_idle_worker_fetches_what_a_busy_one_has() -> None:
    """800 of 1,000 tokens for 20 ms and 0.01 ms each; the holder has a queue of 400 ms."""
    free = {"num_blocks_free": 100}
    busy = worker("p0", num_queued_tokens=400, **free)
    decision = fetching(busy, worker("p1", **free), held={"p0": 50, "d": 20})
    assert (decision.prefill_worker, decision.prefix) == ("p1", PrefixOffer(worker_id="p0", num_blocks=50))
    assert decision.ttft_ms == pytest.approx(20 + 8 + 200)
    decision = fetching(worker("p0", **free), worker("p1", **free), held={"p0": 50, "d": 20})
    assert (decision.prefill_worker, decision.prefix) == ("p0", None)
    decision = fetching(busy, worker("p1", **free), held={"p0": 50, "p1": 30, "d": 50})
    assert (decision.prefill_worker, decision.prefix) == ("p1", PrefixOffer(worker_id="d", num_blocks=50))
    assert decision.ttft_ms == pytest.approx(20 + 3.2 + 200)


@pytest.mark.parametrize(("held", "move_ms_per_token", "num_fetched"), [
    (2, 0.01, 2), (1, 0.01, 0), (50, 0.97, 50), (50, 0.98, 0), (50, 2.0, 0),
])
def test_a_fetch_must_be_quicker_than_computing(held: int, move_ms_per_token: float, num_fetched: int) -> None:
    """20 ms and what a token takes on the link, against 1 ms a token."""
    only = worker("p", num_blocks_free=100, move_ms_per_token=move_ms_per_token)
    decision = fetching(only, held={"d": held})
    assert (decision.prefix.num_blocks if decision.prefix is not None else 0) == num_fetched


def test_whom_nobody_is_to_ask() -> None:
    """One that does not answer, or has failed this request; and nobody at all if fetching is off."""
    only = worker("p", num_blocks_free=100)
    gone = replace(worker("p1"), ready=False)
    assert fetching(only, gone, held={"p1": 50}).prefix is None
    pools = snapshot([only], [worker("d", num_blocks_free=100), worker("e", num_blocks_free=100)], {"d": 50, "e": 40})
    asked = place(replace(FETCH, avoided=frozenset({"d"})), replace(pools, can_fetch=True))
    assert isinstance(asked, Placement)
    assert asked.prefix == PrefixOffer(worker_id="e", num_blocks=40)
    unasked = place(FETCH, pools)
    assert isinstance(unasked, Placement)
    assert unasked.prefix is None


def test_an_explanation_shows_the_fetch() -> None:
    decision = fetching(worker("p", num_blocks_free=100), held={"d": 50})
    [prefill] = [candidate for candidate in candidates(decision) if candidate.part == "prefill"]
    assert prefill.terms == {"queue": 0.0, "fetch": pytest.approx(28.0), "compute": 200.0, "delay": 0.0}
    assert "50 blocks from d" in explain(decision)


def test_a_decode_worker_that_holds_the_prefix_has_less_to_move_and_to_hold() -> None:
    decode = [worker("d0", num_blocks_free=60), worker("d1", move_ms_per_token=0.5)]
    assert placed(place(REQUEST, snapshot([worker("p")], decode)))[1] == "d0"
    assert placed(place(REQUEST, snapshot([worker("p")], decode, held={"d1": 6})))[1] == "d1"


def test_a_fully_cached_prompt_still_computes_a_token() -> None:
    request = replace(REQUEST, num_tokens=96)
    decision = place(request, snapshot([worker("p", prefill_ms_per_token=2.0)], [worker("d")], held={"p": 6}))
    assert isinstance(decision, Placement)
    assert decision.ttft_ms == 2.0


def test_few_free_blocks_are_dear() -> None:
    full, empty = worker("d0", num_blocks_free=10), worker("d1", num_blocks_free=90, next_itl_ms=21.0)
    assert placed(place(replace(REQUEST, num_output_tokens=100), snapshot([worker("p")], [full, empty])))[1] == "d1"


def test_of_equals_the_one_with_more_room_then_by_name() -> None:
    prefill = [worker("p1"), worker("p0"), worker("p2", num_blocks_free=60)]
    assert placed(place(REQUEST, snapshot(prefill, [worker("d")])))[0] == "p2"
    assert placed(place(REQUEST, snapshot(prefill[:2], [worker("d")])))[0] == "p0"


def test_pins_are_honoured_and_an_unknown_one_is_refused() -> None:
    pools = snapshot([worker("p0"), worker("p1", num_queued_tokens=9)], [worker("d0"), worker("d1", next_itl_ms=99.0)])
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
    pools = snapshot([worker("p")], [worker("d", **fields), worker("d1", next_itl_ms=99.0)])
    assert placed(place(REQUEST, pools)) == ("p", "d1")


def test_an_empty_pool_and_one_that_is_too_small_for_now() -> None:
    assert refused(place(REQUEST, snapshot([], [worker("d")]))) == ("prefill", RefusalKind.NONE_LEFT)
    small = worker("d0", num_blocks_total=9, num_blocks_free=9)
    pools = snapshot([worker("p")], [small, worker("d1", ready=False)])
    assert refused(place(REQUEST, pools)) == ("decode", RefusalKind.NO_WORKER)  # a larger one may come back


def test_without_a_handoff_no_decode_worker_is_asked_for() -> None:
    assert placed(place(replace(REQUEST, num_decode_blocks=0), snapshot([worker("p")], []))) == ("p", None)


def fetching_locally(*decode: WorkerView, held: dict[str, int], prefill: WorkerView | None = None) -> Placement:
    """Of 1,000 tokens up to 200 may be computed at a decode worker."""
    views = [replace(each, num_blocks_total=100, local_prefill_ms_per_token=1.0) for each in decode]
    pools = replace(snapshot([prefill] if prefill is not None else [], views, held), can_fetch=True)
    decision = place(replace(FETCH, num_local_tokens=200), pools)
    assert isinstance(decision, Placement), decision
    return decision


def test_a_decode_worker_fetches_what_another_one_has() -> None:
    """The turn before was answered at `full`, which has no room now: 800 tokens take 28 ms to get, 800 to compute."""
    full, free = worker("full", has_room=False), worker("free", num_blocks_free=100)
    busy = worker("p", num_blocks_free=100, num_queued_tokens=5_000)
    for prefill in (busy, None):
        decision = fetching_locally(full, free, held={"full": 50}, prefill=prefill)
        assert (decision.kind, decision.decode_worker) == (PrefillKind.LOCAL, "free")
        assert decision.prefix == PrefixOffer(worker_id="full", num_blocks=50)
        assert decision.ttft_ms == pytest.approx(20 + 8 + 200)
    [shown] = [each for each in candidates(decision) if each.part == "local" and each.worker_id == "free"]
    assert (shown.terms["fetch"], shown.terms["compute"]) == (pytest.approx(28.0), 200.0)
    assert "50 blocks from full" in explain(decision)
    assert fetching_locally(full, free, held={"full": 49}, prefill=busy).kind is PrefillKind.REMOTE, "216 are too many"


def test_a_decode_worker_that_has_as_much_fetches_nothing() -> None:
    holders = [worker("d0", num_blocks_free=100), worker("d1", num_blocks_free=100, num_queued_tokens=100)]
    decision = fetching_locally(*holders, held={"d0": 50, "d1": 50})
    assert (decision.decode_worker, decision.prefix) == ("d0", None)
    decision = fetching_locally(*holders, held={"d0": 49, "d1": 50})
    assert (decision.decode_worker, decision.prefix) == ("d0", None), "a block is quicker computed than fetched"


def test_what_others_wait_for_is_a_reason_to_fetch() -> None:
    """Two blocks: 32 ms to compute, and three sequences wait for as long; 180 ms to fetch at this speed."""
    slow = worker("d0", num_blocks_free=100, move_ms_per_token=5.0)
    assert fetching_locally(slow, worker("e", ready=True, has_room=False), held={"e": 2}).prefix is None
    assert fetching_locally(
        replace(slow, num_sequences=5), worker("e", ready=True, has_room=False), held={"e": 2}
    ).prefix == PrefixOffer(worker_id="e", num_blocks=2)


def test_a_worker_that_failed_is_the_last_resort() -> None:
    pools = snapshot([worker("p0"), worker("p1", num_queued_tokens=10**6)], [worker("d")])
    avoiding = replace(REQUEST, avoided=frozenset({"p0", "d"}))
    assert placed(place(avoiding, pools)) == ("p1", "d")


def test_the_decode_worker_that_holds_verified_blocks_is_preferred() -> None:
    pools = snapshot([worker("p")], [worker("d0"), worker("d1", next_itl_ms=500.0)])
    assert placed(place(replace(REQUEST, preferred_decode="d1"), pools)) == ("p", "d1")


def test_what_the_last_attempt_has_left_there_is_free_for_the_next_one() -> None:
    """Nobody waits for it; others find nothing more there, nor the next attempt elsewhere."""
    needed = REQUEST.num_decode_blocks
    again = replace(REQUEST, preferred_decode="d1", num_own_blocks=needed)
    full = worker("d1", num_blocks_free=0, has_room=False)  # sequences wait for blocks there
    assert placed(place(again, snapshot([worker("p")], [worker("d0"), full]))) == ("p", "d1")
    assert explain(place(again, snapshot([worker("p")], [full]))).startswith("remote prefill")
    assert refused(place(REQUEST, snapshot([worker("p")], [full]))) == ("decode", RefusalKind.NO_ROOM)
    other = snapshot([worker("p")], [replace(full, worker_id="d0")])
    assert refused(place(again, other)) == ("decode", RefusalKind.NO_ROOM)
    less = replace(again, num_own_blocks=needed - 1)
    assert refused(place(less, snapshot([worker("p")], [full]))) == ("decode", RefusalKind.NO_ROOM)
    refusing = replace(full, has_refused=True)
    assert refused(place(again, snapshot([worker("p")], [refusing]))) == ("decode", RefusalKind.NO_ROOM)


@pytest.mark.parametrize("local_ms_per_token", [0.1, 1.5, 3.0])
@pytest.mark.parametrize("num_sequences", [0, 1])
def test_local_prefill_of_a_short_rest_where_it_costs_less(local_ms_per_token: float, num_sequences: int) -> None:
    """84 of 100 tokens are to be computed there; sequences that decode there wait for it too."""
    prefill = [worker("p", num_queued_tokens=50, prefill_ms_per_token=1.0)]
    local = worker(
        "d", local_prefill_ms_per_token=local_ms_per_token, move_ms_per_token=0.1, num_sequences=num_sequences
    )
    asked = replace(REQUEST, num_local_tokens=84)
    decision = place(asked, snapshot(prefill, [local], held={"d": 1}))
    is_cheaper = 84 * local_ms_per_token * (1 + num_sequences) < (50 + 100) * 1.0 + 84 * 0.1
    assert kind_of(decision) is (PrefillKind.LOCAL if is_cheaper else PrefillKind.REMOTE)
    assert placed(decision) == ("d" if is_cheaper else "p", "d")


def kind_of(decision: Placement | Refusal) -> PrefillKind:
    assert isinstance(decision, Placement), decision
    return decision.kind


def test_no_local_prefill_where_it_is_not_offered_or_not_of_a_short_rest() -> None:
    offering, prefill = worker("d", local_prefill_ms_per_token=0.01), [worker("p")]
    asked = replace(REQUEST, num_local_tokens=84)
    assert kind_of(place(asked, snapshot(prefill, [offering], held={"d": 1}))) is PrefillKind.LOCAL
    for request, pools in (
        (asked, snapshot(prefill, [worker("d")], held={"d": 1})),
        (asked, snapshot(prefill, [offering])),
        (replace(asked, num_local_tokens=83), snapshot(prefill, [offering], held={"d": 1})),
        (REQUEST, snapshot(prefill, [offering], held={"d": 6})),
        (replace(asked, pinned_prefill="p"), snapshot(prefill, [offering], held={"d": 1})),
        (replace(asked, num_decode_blocks=0), snapshot(prefill, [offering], held={"d": 1})),
        (asked, snapshot([replace(prefill[0], has_room=True)], [replace(offering, worker_id="e")], held={"d": 1})),
    ):
        assert kind_of(place(request, pools)) is PrefillKind.REMOTE


def test_without_a_prefill_worker_decode_workers_compute_prompts_unless_they_are_not_to() -> None:
    local = [worker("d", local_prefill_ms_per_token=5.0)]
    for prefill in ([], [worker("p", ready=False)], [worker("p", expected=False, ready=False)]):
        assert kind_of(place(REQUEST, snapshot(prefill, local))) is PrefillKind.LOCAL
        assert placed(place(replace(REQUEST, num_decode_blocks=0), snapshot(prefill, local))) == ("d", "d")
        refusing = replace(REQUEST, may_degrade=False)
        assert refused(place(refusing, snapshot(prefill, local)))[0] == "prefill"
        assert refused(place(refusing, snapshot(prefill, [replace(local[0], has_room=False)])))[0] == "prefill"
        full = [replace(local[0], num_blocks_free=9)]
        assert refused(place(REQUEST, snapshot(prefill, full))) == ("local", RefusalKind.NO_ROOM)
    back = snapshot([worker("p", has_room=False)], local)
    assert refused(place(REQUEST, back)) == ("prefill", RefusalKind.NO_ROOM), "one that is full is not gone"
    assert kind_of(place(REQUEST, snapshot([worker("p")], local))) is PrefillKind.REMOTE


def test_a_prompt_that_has_failed_at_every_prefill_worker_is_computed_at_a_decode_worker_that_can() -> None:
    local, failed = [worker("d", local_prefill_ms_per_token=5.0)], replace(
        REQUEST, avoided=frozenset({"p"}), dying=frozenset({"p"})
    )
    there = snapshot([worker("p"), worker("gone", ready=False)], local)
    assert kind_of(place(failed, there)) is PrefillKind.LOCAL
    assert placed(place(replace(failed, num_decode_blocks=0), there)) == ("d", "d")
    for request, pools in (
        (failed, snapshot([worker("p"), worker("q", prefill_ms_per_token=99.0)], local)),
        (replace(failed, num_decode_blocks=0), snapshot([worker("p")], [replace(local[0], num_blocks_free=6)])),
        (failed, snapshot([worker("p")], [worker("d")])),
        (replace(failed, may_degrade=False), there),
        (replace(failed, pinned_prefill="p"), there),
        (replace(failed, dying=frozenset()), there),  # it has come back
    ):
        assert kind_of(place(request, pools)) is PrefillKind.REMOTE


def test_a_decode_worker_that_is_named_computes_the_prompt() -> None:
    local = [worker("d0", local_prefill_ms_per_token=5.0), worker("d1", local_prefill_ms_per_token=99.0), worker("d2")]
    pools = snapshot([worker("p")], local)
    for fields in ({}, {"pinned_decode": "d1"}, {"num_decode_blocks": 0}):
        assert placed(place(replace(REQUEST, pinned_prefill="d1", **fields), pools)) == ("d1", "d1")
    contradiction = replace(REQUEST, pinned_prefill="d1", pinned_decode="d0")
    assert refused(place(contradiction, pools))[0] == "local"
    assert refused(place(replace(REQUEST, pinned_prefill="d2"), pools)) == ("prefill", RefusalKind.UNKNOWN)


def test_local_prefill_serves_when_the_prefill_pool_is_gone_and_no_prefill_worker_was_named() -> None:
    pools = snapshot([], [worker("d", local_prefill_ms_per_token=50.0)])
    decision = place(REQUEST, pools)
    assert isinstance(decision, Placement)
    assert (decision.kind, decision.ttft_ms) == (PrefillKind.LOCAL, 5_000.0)
    assert refused(place(replace(REQUEST, pinned_prefill="p"), pools))[0] == "prefill"


def test_workers_that_have_ended_are_not_waited_for() -> None:
    ended = WorkerView(worker_id="e", ready=False, expected=False)
    away = WorkerView(worker_id="a", ready=False)
    here = [worker("d")]
    assert refused(place(REQUEST, snapshot([ended], here))) == ("prefill", RefusalKind.NONE_LEFT)
    assert refused(place(REQUEST, snapshot([ended, away], here))) == ("prefill", RefusalKind.NO_WORKER)
    assert refused(place(REQUEST, snapshot([worker("p")], [ended]))) == ("decode", RefusalKind.NONE_LEFT)


def test_room_now_is_for_the_projection_room_at_all_for_the_whole() -> None:
    request = replace(REQUEST, num_decode_blocks_at_most=90)
    assert placed(place(request, snapshot([worker("p")], [worker("d", num_blocks_free=10)]))) == ("p", "d")
    small = worker("small", num_blocks_total=89)
    assert placed(place(request, snapshot([worker("p")], [small, worker("d", num_blocks_free=10)]))) == ("p", "d")
    assert refused(place(request, snapshot([worker("p")], [small]))) == ("decode", RefusalKind.NEVER)
