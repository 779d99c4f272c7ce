"""What holds of every placement, whatever the request and the pools."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router import costs
from pd_router.explanation import candidates
from pd_router.placement import Placement, PrefillKind, Refusal, RefusalKind, place
from pd_router.pools import PlacementRequest, Snapshot, WorkerView

NUM_PROMPT_BLOCKS = 8
RATES = st.floats(0.001, 50.0)


def pools(names: str) -> st.SearchStrategy[list[WorkerView]]:
    views = st.builds(
        WorkerView,
        worker_id=st.sampled_from(names),
        ready=st.integers(0, 4).map(bool),
        expected=st.integers(0, 8).map(bool),
        has_room=st.integers(0, 4).map(bool),
        num_queued_tokens=st.integers(0, 500),
        num_sequences=st.integers(0, 50),
        num_blocks_free=st.integers(0, 30),
        num_blocks_total=st.integers(25, 30),
        prefill_ms_per_token=RATES,
        next_itl_ms=RATES,
        move_ms_per_token=RATES,
        local_prefill_ms_per_token=st.none() | RATES if names == "def" else st.none(),
    )
    return st.lists(views, max_size=3, unique_by=lambda view: view.worker_id)


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    num_tokens = draw(st.integers(NUM_PROMPT_BLOCKS * 16, NUM_PROMPT_BLOCKS * 16 + 15))
    avoided = draw(st.frozensets(st.sampled_from("abcdef"), max_size=3))
    return PlacementRequest(
        num_tokens=num_tokens,
        num_prefill_blocks=-(-num_tokens // 16),
        num_decode_blocks=draw(st.sampled_from([0, 10, 26])),
        num_output_tokens=draw(st.integers(1, 1_000)),
        pinned_prefill=draw(st.sampled_from(["", "", "", "a", "d"])),
        num_local_tokens=draw(st.sampled_from([0, 40, 1_000])),
        may_degrade=draw(st.booleans()),
        pinned_decode=draw(st.sampled_from(["", "", "", "d"])),
        avoided=avoided,
        dying=draw(st.sampled_from([frozenset(), avoided])),
        preferred_decode=draw(st.sampled_from(["", "e"])),
    )


HELD = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, NUM_PROMPT_BLOCKS))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    return Snapshot(
        prefill=tuple(draw(pools("abc"))), decode=tuple(draw(pools("def"))), held=draw(HELD),
        can_fetch=draw(st.booleans()),
    )


def can_take(worker: WorkerView, num_blocks: int, pinned: str) -> bool:
    is_there = worker.ready and worker.expected and worker.has_room
    return is_there and num_blocks <= worker.num_blocks_free and pinned in ("", worker.worker_id)


@settings(deadline=None, max_examples=50)
@given(request=requests(), snapshot=snapshots())
def test_only_workers_with_room_that_take_work_and_a_refusal_only_where_there_is_none(
    request: PlacementRequest, snapshot: Snapshot
) -> None:
    prefill = {w.worker_id for w in snapshot.prefill if can_take(w, request.num_prefill_blocks, request.pinned_prefill)}
    decode = {w.worker_id for w in snapshot.decode if can_take(w, request.num_decode_blocks, request.pinned_decode)}
    local = {
        w.worker_id
        for w in snapshot.decode
        if w.local_prefill_ms_per_token is not None and can_take(w, request.num_local_blocks, request.pinned_decode)
        and request.pinned_prefill in ("", w.worker_id)
    }
    has_prefill = any(w.ready and w.expected for w in snapshot.prefill)
    has_other = any(w.ready and w.expected and w.worker_id not in request.dying for w in snapshot.prefill)
    decision = place(request, snapshot)
    if isinstance(decision, Refusal):
        assert not {"decode": decode, "prefill": prefill, "local": local}[decision.role]
        if not request.pinned_prefill and not has_other and request.may_degrade:
            assert not local
        assert decision.kind is not RefusalKind.NO_ROOM or snapshot.prefill or snapshot.decode
        return
    if decision.kind is PrefillKind.LOCAL:
        assert request.may_degrade or has_prefill or request.pinned_prefill
    elif request.num_decode_blocks:
        assert decision.decode_worker in decode
    else:
        assert decision.decode_worker is None
    if decision.kind is PrefillKind.LOCAL:
        assert decision.prefill_worker == decision.decode_worker
        assert decision.decode_worker in local
        if not request.pinned_prefill and (has_other or not request.may_degrade):
            num_held = snapshot.held.get(decision.prefill_worker, 0)
            if decision.prefix is not None:
                num_held = decision.prefix.num_blocks
            assert num_held > 0
            assert costs.num_uncached_tokens(request, num_held) <= request.num_local_tokens
    else:
        assert decision.prefill_worker in prefill
    is_local = decision.kind is PrefillKind.LOCAL
    alternatives = {decision.prefill_worker: prefill, decision.decode_worker: decode} if not is_local else {}
    for chosen, usable in alternatives.items():
        assert chosen not in request.avoided or usable <= request.avoided


@settings(deadline=None, max_examples=50)
@given(request=requests(), snapshot=snapshots())
def test_the_explanation_has_the_chosen_ones_as_its_cheapest_and_the_costs_that_decided(
    request: PlacementRequest, snapshot: Snapshot
) -> None:
    decision = place(request, snapshot)
    judged = [c for c in candidates(decision) if c.exclusion is None]
    if isinstance(decision, Refusal):
        assert not [c for c in judged if c.part == decision.role]
        return
    least = {c.part: min(j.cost_ms for j in judged if j.part == c.part) for c in judged}
    if decision.kind is PrefillKind.LOCAL:
        chosen = {"local": decision.decode_worker}
    else:
        chosen = {"prefill": decision.prefill_worker, "decode": decision.decode_worker}
    for part, worker_id in chosen.items():
        if worker_id is not None:
            [candidate] = [c for c in judged if (c.part, c.worker_id) == (part, worker_id)]
            assert math.isclose(candidate.cost_ms, least[part])
    own_ms = sum(
        ms for c in judged if chosen.get(c.part) == c.worker_id for name, ms in c.terms.items() if name != "delay"
    )
    assert math.isclose(decision.cost_ms, own_ms)
    assert all(term >= 0 for candidate in judged for term in candidate.terms.values())


@settings(deadline=None, max_examples=50)
@given(request=requests(), snapshot=snapshots(), worker_id=st.sampled_from("abcdef"))
def test_more_cached_prefix_never_makes_a_worker_dearer(
    request: PlacementRequest, snapshot: Snapshot, worker_id: str
) -> None:
    judged = candidates(place(request, snapshot))
    before = {(c.part, c.worker_id): c.cost_ms for c in judged if c.exclusion is None}
    num_held = min(NUM_PROMPT_BLOCKS, snapshot.held.get(worker_id, 0) + 1)
    more = replace(snapshot, held={**snapshot.held, worker_id: num_held})
    decision = place(request, more)
    for candidate in candidates(decision):
        cost_before = before.get((candidate.part, candidate.worker_id))
        if cost_before is None:  # it was out, as having too little cached
            continue
        if candidate.worker_id == worker_id or snapshot.can_fetch:
            assert candidate.cost_ms <= cost_before + 1e-9 * abs(cost_before)
        else:
            assert candidate.cost_ms == cost_before
    assert isinstance(decision, Placement) == isinstance(place(request, snapshot), Placement)


@settings(deadline=None, max_examples=50)
@given(request=requests(), snapshot=snapshots(), within_ms=st.floats(1, 20_000))
def test_a_placement_is_late_only_if_every_one_would_be(
    request: PlacementRequest, snapshot: Snapshot, within_ms: float
) -> None:
    decision = place(replace(request, first_token_within_ms=within_ms), snapshot)
    if isinstance(decision, Placement) and decision.kind is PrefillKind.REMOTE and decision.ttft_ms > within_ms:
        judged = candidates(place(request, snapshot))
        in_time = [c for c in judged if c.part == "prefill" and c.exclusion is None]
        assert all(sum(c.terms.values()) - c.terms["delay"] > within_ms for c in in_time)


@settings(deadline=None, max_examples=50)
@given(request=requests(), snapshot=snapshots())
def test_what_is_fetched_is_there_and_saves_time(request: PlacementRequest, snapshot: Snapshot) -> None:
    """From a worker that answers, has it and has not failed the request; never slower than without."""
    decision = place(request, snapshot)
    without = place(request, replace(snapshot, can_fetch=False))
    if not isinstance(decision, Placement) or decision.prefix is None:
        return
    offer, own = decision.prefix, snapshot.held.get(decision.prefill_worker, 0)
    assert snapshot.can_fetch and offer.worker_id != decision.prefill_worker
    assert own < offer.num_blocks == snapshot.held[offer.worker_id]
    assert next(w.ready for w in (*snapshot.prefill, *snapshot.decode) if w.worker_id == offer.worker_id)
    assert offer.worker_id not in request.avoided
    assert isinstance(without, Placement)
    [worker] = [w for w in (*snapshot.prefill, *snapshot.decode) if w.worker_id == decision.prefill_worker]
    if decision.kind is PrefillKind.REMOTE:
        assert decision.ttft_ms < costs.first_token_ms(worker, request, own, None)
    else:
        assert decision.cost_ms < sum(costs.local_terms(worker, request, own, offer=None).values())


@settings(deadline=None, max_examples=50)
@given(request=requests(), snapshot=snapshots(), seed=st.integers(0, 100))
def test_the_order_of_a_pool_decides_nothing(request: PlacementRequest, snapshot: Snapshot, seed: int) -> None:
    shuffled = random.Random(seed)
    prefill, decode = list(snapshot.prefill), list(snapshot.decode)
    shuffled.shuffle(prefill)
    shuffled.shuffle(decode)
    first = place(request, snapshot)
    second = place(request, replace(snapshot, prefill=tuple(prefill), decode=tuple(decode)))
    assert replace(second, snapshot=snapshot) == first


def test_the_pace_of_a_batch_grows_with_it() -> None:
    paces = [costs.assumed_itl_ms(num_sequences) for num_sequences in range(20)]
    assert paces == sorted(paces)


@given(requests(), snapshots(), RATES | st.just(math.inf))
def test_nobody_is_placed_where_the_pace_would_be_too_slow(
    request: PlacementRequest, snapshot: Snapshot, within_ms: float
) -> None:
    request = replace(request, itl_within_ms=within_ms)
    decode = tuple(replace(view, itl_limit_ms=20.0) for view in snapshot.decode)
    decision = place(request, replace(snapshot, decode=decode))
    for view in decode:
        if view.worker_id in (getattr(decision, "decode_worker", None), getattr(decision, "prefill_worker", None)):
            assert view.next_itl_ms <= min(20.0, within_ms)
    if isinstance(decision, Refusal) and decision.kind is RefusalKind.TOO_SLOW:
        assert any(view.alone_itl_ms > within_ms for view in decode)
