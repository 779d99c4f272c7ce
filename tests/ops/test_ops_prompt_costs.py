"""What prompts cost is found again from measurements of known costs, whatever waited for what; and a fit says of which
load it knows nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pd_ops.bench.serve.diagnose import diagnose
from pd_ops.bench.serve.prompt_costs import prompt_costs, stretches
from pd_ops.bench.serve.record import Outcome, Record
from pd_ops.bench.serve.request_parts import Part, num_pairs
from pd_ops.sizing.cache import Prompt
from pd_ops.sizing.cost_model import CostModel
from pd_ops.sizing.fitting import fit
from pd_ops.sizing.limits import limits
from pd_ops.sizing.measured import measured_settings
from pd_ops.sizing.outcome import Traveller, replayed
from pd_ops.sizing.pools import Pools
from pd_ops.sizing.study import Study, compared
from pd_ops.sizing.world import World
from support.serve_results import example

DOOR_MS, TOKEN_MS, PAIR_MS = 30.0, 0.4, 0.001
Order = Callable[[Sequence[Record]], Record]


def first_come(waiting: Sequence[Record]) -> Record:
    return min(waiting, key=lambda one: one.sent_s)


def shortest(waiting: Sequence[Record]) -> Record:
    return min(waiting, key=lambda one: one.prompt_tokens)


def asked(number: int, sent_s: float, num_tokens: int, num_cached: int = 0) -> Record:
    """The router's queue time is of no use: it says that nobody ever waited."""
    return Record(
        number=number, kind="x", intended_s=sent_s, sent_s=sent_s, end_s=sent_s, outcome=Outcome.FINISHED,
        prompt_tokens=num_tokens, asked_tokens=2, num_cached_tokens=num_cached, queue_ms=0.0,
    )


def answered(record: Record, first_s: float) -> Record:
    return replace(record, arrivals=((first_s, 1), (first_s + 0.01, 1)), end_s=first_s + 0.01)


def compute_s(record: Record) -> float:
    return (TOKEN_MS * (record.prompt_tokens - (record.num_cached_tokens or 0)) + PAIR_MS * num_pairs(record)) / 1e3


def served(requests: Sequence[Record], order: Order, *, noise: float = 0.0) -> list[Record]:
    """By one worker, one after the other in that order."""
    rng = random.Random(5)
    done: list[Record] = []
    left = sorted(requests, key=lambda one: one.sent_s)
    now_s = 0.0
    while left:
        now_s = max(now_s, left[0].sent_s)
        chosen = order([one for one in left if one.sent_s <= now_s])
        now_s += compute_s(chosen) * rng.uniform(1 - noise, 1 + noise)
        done.append(answered(chosen, now_s + DOOR_MS / 1e3))
        left.remove(chosen)
    return done


def mixed(num_requests: int, gap_s: float) -> list[Record]:
    """Half of them short, the others up to 4,000 tokens, of which some are cached."""
    rng = random.Random(3)
    at_s, found = 0.0, []
    for number in range(num_requests):
        at_s += rng.expovariate(1 / gap_s)
        tokens = rng.randint(5, 50) if number % 2 else rng.randint(300, 4000)
        found.append(asked(number, at_s, tokens, num_cached=tokens // 2 if number % 6 == 0 else 0))
    return found


def busy_share(records: Sequence[Record]) -> float:
    return sum(map(compute_s, records)) / (max(one.end_s for one in records) - records[0].sent_s)


@pytest.mark.parametrize("order", [first_come, shortest])
@pytest.mark.parametrize(("gap_s", "least_busy"), [(1.9, 0.75), (30.0, 0.0)])
def test_costs_are_found_under_load_and_without(order: Order, gap_s: float, least_busy: float) -> None:
    records = served(mixed(120, gap_s), order, noise=0.1)
    assert least_busy <= busy_share(records) < least_busy + 0.2
    found = prompt_costs(records, 1)
    assert found.door_ms == pytest.approx(DOOR_MS, rel=0.25)
    assert found.ms_per_token == pytest.approx(TOKEN_MS, rel=0.25)
    assert found.ms_per_pair == pytest.approx(PAIR_MS, rel=0.15)
    total_s = sum(map(compute_s, records))
    costs_s = sum(found.ms_per_token * (one.prompt_tokens - (one.num_cached_tokens or 0))
                  + found.ms_per_pair * num_pairs(one) for one in records) / 1e3
    assert costs_s == pytest.approx(total_s, rel=0.05), "what a worker does in all matters most"


def test_prompts_that_end_in_one_step_are_one_stretch() -> None:
    """Their first tokens come together, after the computation of all of them."""
    together = [asked(number, 1.0 + number / 100, 500) for number in range(3)]
    first_s = 1.0 + sum(map(compute_s, together)) + DOOR_MS / 1e3
    [stretch] = stretches([answered(one, first_s) for one in together], 1)
    assert (stretch.tokens, stretch.pairs, stretch.num_doors, stretch.is_lone) == (1500, 3 * 125_000, 1, False)
    assert stretch.busy_ms == pytest.approx(DOOR_MS + 1500 * TOKEN_MS + 375_000 * PAIR_MS)


def test_prompts_with_a_worker_each_are_lone() -> None:
    two = [answered(one, one.sent_s + compute_s(one) + DOOR_MS / 1e3)
           for one in (asked(0, 1.0, 1000), asked(1, 1.1, 3000), asked(2, 20.0, 10))]
    assert [stretch.is_lone for stretch in stretches(two, 2)] == [True, True, True]
    assert [stretch.is_lone for stretch in stretches(two, 1)] == [False, True]


def test_a_queue_of_others_is_left_out_and_one_of_these_is_in() -> None:
    alone = replace(answered(asked(0, 1.0, 100), 2.0), queue_ms=700.0)
    assert stretches([alone], 1)[0].busy_ms == pytest.approx(300)
    second = replace(answered(asked(1, 1.5, 100), 3.0), queue_ms=700.0)
    assert stretches([alone, second], 1)[0].busy_ms == pytest.approx(2000)


def test_two_workers_share_what_is_waited_for() -> None:
    """Three prompts at once: two for 1 s, then the third for 1 s, beside nobody."""
    three = [answered(asked(0, 0.0, 100), 1.0), answered(asked(1, 0.0, 100), 1.0), answered(asked(2, 0.0, 100), 2.0)]
    [stretch] = stretches(three, 2)
    assert stretch.busy_ms == pytest.approx(3000)
    assert stretch.tokens == 300


def test_prompts_that_are_alike_tell_no_doors() -> None:
    """A worker is taken to be busy for all of the time: rather too few requests than a queue that cannot be."""
    alike = served([asked(number, 10.0 * number, 500) for number in range(20)], first_come)
    found = prompt_costs(alike, 1)
    assert (found.tells_doors, found.door_ms, found.ms_per_pair) == (False, 0.0, 0.0)
    assert found.ms_per_token * 500 == pytest.approx(DOOR_MS + 500 * TOKEN_MS + 125_000 * PAIR_MS)
    assert prompt_costs(served(mixed(60, 30.0), first_come), 1).tells_doors


def test_a_stall_of_the_machine_is_no_law() -> None:
    records = served(mixed(60, 30.0), first_come)
    stalled = [replace(one, arrivals=((one.arrivals[0][0] + 9.0, 1),)) if one.number in (7, 30) else one
               for one in records]
    found = prompt_costs(stalled, 1)
    assert found.ms_per_token == pytest.approx(TOKEN_MS, rel=0.1)
    assert found.ms_per_pair == pytest.approx(PAIR_MS, rel=0.1)
    assert max(found.late) > 10


def test_a_diagnosis_under_load_takes_waiting_for_neither_prompts_nor_doors() -> None:
    records = served(mixed(120, 1.9), first_come)
    made = example()
    found = {one.part: one for one in diagnose(replace(made, records=tuple(records)))}
    waited_s = sum(one.arrivals[0][0] - one.sent_s - compute_s(one) - DOOR_MS / 1e3 for one in records)
    total_s = sum(one.end_s - one.sent_s for one in records)
    assert found[Part.QUEUE].share == pytest.approx(waited_s / total_s, abs=0.03)
    assert found[Part.PREFILL].share == pytest.approx(sum(map(compute_s, records)) / total_s, abs=0.03)


TRUTH = CostModel(
    source="a test", door_ms=30.0, prefill_ms_per_token=0.4, prefill_ms_per_pair=0.001, decode_step_ms=6.0,
    decode_ms_per_sequence=0.5, handoff_ms=12.0, first_late=(-1.0, 0.0, 1.0, 3.0), decode_spread=(0.9, 1.0, 1.2),
)
POOLS = Pools(prefill=1, decode=1, num_blocks=5000, block_size=16, ttft_target_ms=2000.0, itl_target_ms=100.0)


def played(travellers: list[Traveller], seed: int) -> Any:
    """A measurement, by the production planner of chunks and the router's line."""
    World(POOLS, TRUTH, travellers, seed=seed).run()
    records = []
    for number, one in enumerate(travellers):
        step_s = (one.end_s - one.first_s) / max(1, one.num_output - 1)
        times = tuple((one.first_s + step_s * index, 1) for index in range(one.num_output))
        records.append(replace(
            asked(number, one.arrival_s, one.num_prompt), arrivals=times, end_s=one.end_s, asked_tokens=one.num_output,
        ))
    made = example()
    summary = made.document["summary"] | {
        "ttft_ms": quantiles([one.ttft_ms for one in travellers]),
        "itl_ms": quantiles([one.mean_itl_ms for one in travellers]),
    }
    return replace(made, records=tuple(records), document=made.document | {"summary": summary})


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * len(ordered))]}


def load(num_requests: int, gap_s: float, seed: int) -> list[Traveller]:
    rng = random.Random(seed)
    at_s, found = 0.0, []
    for number in range(num_requests):
        at_s += rng.expovariate(1 / gap_s)
        tokens = rng.randint(5, 50) if number % 2 else rng.randint(300, 4000)
        found.append(Traveller(at_s, Prompt(num_tokens=tokens), 20, 20))
    return found


@pytest.mark.parametrize("gap_s", [2.4, 30.0])
def test_a_fit_replays_another_run_of_the_same_load(gap_s: float) -> None:
    fitted = fit(played(load(100, gap_s, seed=1), seed=1))
    other = played(load(100, gap_s, seed=2), seed=2)
    study = Study(cost=fitted, travellers=lambda: replayed(other.records), pools=POOLS)
    row = study.row(1, 1, with_failures=False)
    ratios = {one["name"]: one["ratio"] for one in compared([row], other, POOLS) or ()}
    assert ratios["ttft_ms p50"] == pytest.approx(1.0, abs=0.2), ratios
    assert ratios["ttft_ms p99"] == pytest.approx(1.0, abs=0.2), ratios
    assert ratios["itl_ms p50"] == pytest.approx(1.0, abs=0.2), ratios


def test_a_fit_of_a_run_that_never_was_idle_says_so() -> None:
    fitted = fit(played(load(60, 0.5, seed=1), seed=1))
    assert "measure at a lower rate" in fitted.fit_limit
    assert limits(fitted, [], most_prompt_tokens=10) == [f"the fit: {fitted.fit_limit}"]


def row(**fields: Any) -> dict[str, Any]:
    return {"prefill": 1, "decode": 2, "prefill_busy_share": 0.5, "mean_batch": 3.0, **fields}


def test_limits_are_said() -> None:
    cost = replace(TRUTH, most_prompt_tokens=1000, most_sequences=4.0)
    assert limits(cost, [row()], most_prompt_tokens=1200) == []
    [prompts] = limits(cost, [row()], most_prompt_tokens=4000)
    assert "prompts of up to 4,000 tokens, costs were fitted with up to 1,000" in prompts
    [batch] = limits(cost, [row(mean_batch=9.0)], most_prompt_tokens=1000)
    assert "batches of 9.0 on average, costs were fitted with up to 4.0" in batch
    [near] = limits(cost, [row(prefill_busy_share=0.8)], most_prompt_tokens=1000)
    assert near == "1:2: prefill workers are 80% busy: if prompts cost 5% more, they wait some 25% longer"
    [beyond] = limits(cost, [row(prefill_busy_share=0.97)], most_prompt_tokens=1000)
    assert "they cannot keep up" in beyond
    assert limits(TRUTH, [row(mean_batch=500.0)], most_prompt_tokens=10**6) == [], "of a data sheet no bound is known"


def test_a_replay_has_the_settings_that_were_measured() -> None:
    made = example()
    settings = {"engine": {"chunk_tokens": 64}, "decode": {"max_batch": 4, "itl_budget_ms": None}, "router": None}
    result = replace(made, document=made.document | {"identity": made.identity | {"settings": settings}})
    assert measured_settings(result) == {"chunk_tokens": 64, "max_batch": 4}
    assert measured_settings(replace(made, document=made.document | {"identity": {}})) == {}
