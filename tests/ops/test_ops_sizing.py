"""`simulate capacity`: what can be computed by hand comes out, every request ends, and a fit finds what was put in."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_engine.errors import InvalidArgument, NotFound
from pd_ops.bench.serve.load import LoadPlan, build_load
from pd_ops.bench.serve.record import Outcome as End
from pd_ops.bench.serve.record import Record
from pd_ops.bench.serve.summary import percentile
from pd_ops.sizing.cache import Prompt
from pd_ops.sizing.cells import deal, play, split
from pd_ops.sizing.cost_model import CostModel, read_cost
from pd_ops.sizing.fitting import Steps, fit, plane, steps_of
from pd_ops.sizing.histogram import Histogram
from pd_ops.sizing.outcome import Traveller, travellers_of
from pd_ops.sizing.pools import Failure, Pools
from pd_ops.sizing.study import Prices, Study, best_ratios, compared, front, parse_failure, parse_pools
from pd_ops.sizing.world import World
from support.commands import run_command
from support.serve_results import example

COST = CostModel(
    source="a test", door_ms=3.0, prefill_ms_per_token=0.5, decode_step_ms=10.0, decode_ms_per_sequence=1.0,
    decode_ms_per_slot=0.001, handoff_ms=5.0,
)
POOLS = Pools(prefill=1, decode=1, num_blocks=1000, block_size=64, ttft_target_ms=1000.0, itl_target_ms=40.0)


def traveller(arrival_s: float, num_prompt: int, num_output: int) -> Traveller:
    return Traveller(arrival_s, Prompt(num_tokens=num_prompt), num_output, num_output)


def load(num_requests: int, rate_per_s: float, kind: str = "short") -> list[Traveller]:
    plan = LoadPlan(kinds=(kind,), num_requests=num_requests, rate_per_s=rate_per_s, seed=1)
    return travellers_of(build_load(plan, 20_000).requests)


def run(pools: Pools, travellers: list[Traveller], cost: CostModel = COST, **more: Any) -> dict[str, Any]:
    outcome = World(pools, cost, travellers, **more).run()
    return outcome.summary(prefill=pools.prefill, decode=pools.decode, ttft_ms=pools.ttft_target_ms,
                           itl_ms=pools.itl_target_ms)


def test_one_request_takes_what_its_parts_take() -> None:
    """100 prompt tokens, chunks of 256; steps 10 + 1 + 0.001 a slot, of which there is one more each time."""
    alone = traveller(0.0, 100, 4)
    World(POOLS, COST, [alone]).run()
    assert alone.ttft_ms == pytest.approx(100 * 0.5 + 3)
    steps_ms = sum(11 + 0.001 * (101 + number) for number in range(3))
    assert alone.end_s == pytest.approx((100 * 0.5 + 5 + steps_ms) / 1e3)


def test_two_prompts_share_a_prefill_worker_by_the_planner_of_chunks() -> None:
    """The second, a short one, takes half of the next step: it does not wait for all of the first."""
    long, short = traveller(0.0, 1024, 1), traveller(0.01, 64, 1)
    World(POOLS, COST, [long, short]).run()
    assert short.first_s < long.first_s
    assert long.ttft_ms == pytest.approx((1024 + 64) * 0.5 + 3)


def test_a_prompt_that_waits_at_the_router_cannot_go_beside_the_one_before_it() -> None:
    """4,000 tokens take 2 s: more than the line lets wait at a worker, so the short one comes when they are done."""
    ttft_ms = {}
    for max_queued_ms in (1000.0, 5000.0):
        long, short = traveller(0.0, 4000, 1), traveller(0.3, 64, 1)
        World(replace(POOLS, max_queued_ms=max_queued_ms), COST, [long, short]).run()
        ttft_ms[max_queued_ms] = short.ttft_ms
    assert ttft_ms[1000.0] > 1500
    assert ttft_ms[5000.0] < 400


def test_a_batch_steps_together() -> None:
    together = [traveller(0.0, 10, 50) for _ in range(4)]
    found = run(POOLS, together)
    assert found["itl_ms"]["p50"] == pytest.approx(14.1, rel=0.02)
    assert found["mean_batch"] == pytest.approx(4, abs=0.2)


def test_the_same_seed_plays_the_same() -> None:
    cost = replace(COST, decode_spread=(0.5, 1.0, 2.0), first_late=(-0.5, 4.0))
    first, second, other = (run(POOLS, load(60, 5), cost, seed=seed) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.parametrize(("kind", "rate", "best"), [("documents", 0.5, (3, 1)), ("reasoning", 0.5, (1, 3))])
def test_the_better_ratio_is_the_one_that_the_load_asks_for(kind: str, rate: float, best: tuple[int, int]) -> None:
    """Long prompts want prefill workers, long answers decode workers."""
    study = Study(cost=COST, travellers=lambda: load(60, rate, kind), pools=replace(POOLS, itl_target_ms=16.0))
    rows = {pools: study.row(*pools, with_failures=False) for pools in ((3, 1), (1, 3))}
    assert max(rows, key=lambda pools: rows[pools]["goodput_per_s"]) == best, rows


def test_cached_prefixes_are_not_computed_again() -> None:
    shared = tuple(bytes([number]) * 16 for number in range(4))
    prompts = [
        Traveller(at_s, Prompt(num_tokens=300, hashes=shared), 2, 2) for at_s in (0.0, 10.0)
    ]
    World(POOLS, COST, prompts).run()
    assert [one.num_cached for one in prompts] == [0, 256]


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_every_request_ends_though_a_worker_dies(worker: str) -> None:
    pools = replace(POOLS, prefill=2, decode=2)
    quiet = run(pools, load(80, 8))
    found = run(pools, load(80, 8), failures=[Failure(worker_id=worker, at_s=3.0, back_after_s=2.0)])
    assert (quiet["finished"], quiet["moved"]) == (80, 0)
    assert found["finished"] == 80
    assert found["moved"] > 0
    assert found["prompt_tokens"] == quiet["prompt_tokens"]
    worst = ("ttft_ms", "request_itl_ms")
    assert sum(found[name]["p99"] for name in worst) > sum(quiet[name]["p99"] for name in worst)


def test_without_prefill_workers_decode_workers_compute_prompts() -> None:
    found = run(replace(POOLS, prefill=0, decode=2), load(20, 2))
    assert (found["finished"], found["local"]) == (20, 20)


def test_targets_refuse_only_where_the_router_has_them() -> None:
    few = replace(POOLS, ttft_target_ms=200.0)
    assert run(few, load(150, 20))["refused"] == 0
    refusing = run(replace(few, refuses=True), load(150, 20))
    assert refusing["refused"] > 0
    assert refusing["failed"] == 0
    assert refusing["good_share"] > run(few, load(150, 20))["good_share"]


def test_percentiles_of_the_histogram() -> None:
    rng = random.Random(3)
    values = sorted(rng.lognormvariate(2, 1) for _ in range(20_000))
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for share in (0.01, 0.5, 0.99, 1.0):
        assert histogram.percentile(share) == pytest.approx(percentile(values, share), rel=0.03)
    assert Histogram().percentile(0.5) is None


def test_a_plane_is_found_again() -> None:
    rng = np.random.default_rng(1)
    sequences = rng.integers(1, 40, 4000).astype(float)
    slots = sequences * rng.integers(100, 4000, 4000)
    ms = (8 + 0.5 * sequences + 0.0004 * slots) * rng.uniform(0.9, 1.1, 4000)
    base, sequence, slot = plane(Steps(ms=ms, sequences=sequences, slots=slots))
    assert base == pytest.approx(8, rel=0.15)
    assert sequence == pytest.approx(0.5, rel=0.15)
    assert slot == pytest.approx(0.0004, rel=0.15)


def record(number: int, begin_s: float, *, num_tokens: int, gap_s: float) -> Record:
    """First token 0.1 s after `begin_s` and 1 ms for each of the 100 to 200 prompt tokens."""
    prompt = 100 + number % 101
    first_s = begin_s + 0.1 + prompt / 1e3
    arrivals = tuple((first_s + gap_s * index, 1) for index in range(num_tokens))
    return Record(
        number=number, kind="short", intended_s=begin_s, sent_s=begin_s, end_s=arrivals[-1][0], outcome=End.FINISHED,
        prompt_tokens=prompt, asked_tokens=num_tokens, arrivals=arrivals, num_cached_tokens=0, queue_ms=0.0,
    )


def test_a_fit_finds_what_was_measured() -> None:
    """Streams one after the other, each 10 ms a token."""
    records = tuple(record(number, 3.0 * number, num_tokens=50, gap_s=0.01) for number in range(40))
    cost = fit(replace(example(), records=records))
    assert cost.prefill_ms_per_token == pytest.approx(1.0, rel=0.05)
    assert cost.door_ms == pytest.approx(100, rel=0.05)
    assert cost.decode_s(1, 150) == pytest.approx(0.01, rel=0.05)
    assert max(cost.decode_spread) == pytest.approx(1.0, abs=0.05)
    assert max(map(abs, cost.first_late)) < 1
    assert cost.fit_limit == ""
    assert steps_of(records, 1, 1.0).sequences.max() == pytest.approx(1.0)


def test_a_fit_needs_enough() -> None:
    with pytest.raises(InvalidArgument, match="at least 10 finished requests"):
        fit(example())


def test_cells_are_equal_and_have_some_of_each_pool() -> None:
    cells = split(replace(POOLS, prefill=5, decode=7), 3)
    assert [(cell.prefill, cell.decode) for cell in cells] == [(2, 3), (2, 2), (1, 2)]
    assert [cell.prefill for cell in split(replace(POOLS, prefill=0, decode=2), 2)] == [0, 0]
    for prefill, decode in ((2, 9), (9, 2)):
        with pytest.raises(InvalidArgument, match=f"{prefill}:{decode} workers cannot be 3 cells"):
            split(replace(POOLS, prefill=prefill, decode=decode), 3)


def test_a_request_goes_where_its_beginning_is_while_that_cell_has_its_share() -> None:
    def turn(talk: int, number: int) -> Traveller:
        hashes = tuple(bytes([talk, block]) * 8 for block in range(8 * (number + 1)))
        return Traveller(0.0, Prompt(num_tokens=100, hashes=hashes), 10, 10)

    cells = split(replace(POOLS, prefill=2, decode=2), 2)
    talks = [turn(talk, number) for number in range(20) for talk in range(2)]
    found = deal(talks, cells)
    assert [{one.prompt.hashes[0][0] for one in mine} for mine in found] == [{0}, {1}]
    one_talk = deal([turn(0, number) for number in range(20)], cells)
    assert [len(mine) for mine in one_talk] == [10, 10]


def test_one_cell_is_one_world_and_a_hundred_times_as_much_in_a_hundred_cells_is_the_same() -> None:
    exact = World(POOLS, COST, load(40, 4)).run()
    alone = play(POOLS, COST, load(40, 4), num_cells=1, seed=0, failures=[])
    assert [one.end_s for one in alone.travellers] == [one.end_s for one in exact.travellers]
    tenfold = [traveller(one.arrival_s, 100, 20) for one in load(20, 4) for _ in range(10)]
    many = play(replace(POOLS, prefill=10, decode=10), COST, tenfold, num_cells=10, seed=0, failures=[])
    single = World(POOLS, COST, tenfold_again := [traveller(one.arrival_s, 100, 20) for one in load(20, 4)]).run()
    assert [one.end_s for one in many.travellers[::10]] == [one.end_s for one in tenfold_again]
    assert many.totals.num_steps == 10 * single.totals.num_steps
    assert many.decode_busy_s == pytest.approx(10 * single.decode_busy_s)
    assert many.totals.itl_ms.percentile(0.99) == single.totals.itl_ms.percentile(0.99)


def test_a_worker_dies_in_its_own_cell() -> None:
    pools, failure = replace(POOLS, prefill=4, decode=4), Failure(worker_id="decode-3", at_s=3.0, back_after_s=2.0)
    first_cell = [traveller.arrival_s for traveller in deal(load(160, 16), split(pools, 2))[0]]
    outcome = play(pools, COST, load(160, 16), num_cells=2, seed=0, failures=[failure])
    assert outcome.totals.num_moved > 0
    assert all(one.ending == "finished" for one in outcome.travellers)
    untouched = play(pools, COST, load(160, 16), num_cells=2, seed=0, failures=[])
    changed = [mine.arrival_s for mine, other in zip(outcome.travellers, untouched.travellers, strict=True)
               if mine.end_s != other.end_s]
    assert changed
    assert not set(changed) & set(first_cell)


def test_the_front_leaves_out_what_another_beats() -> None:
    def row(workers: int, goodput: float, ttft: float) -> dict[str, Any]:
        return {"prefill": 1, "decode": workers - 1, "goodput_per_s": goodput, "ttft_ms": {"p99": ttft},
                "itl_ms": {"p99": 1.0}}

    assert front([row(2, 1.0, 50), row(3, 1.0, 60), row(3, 2.0, 60), row(4, 2.0, 60)]) == [True, False, True, False]
    assert front([row(2, 1.0, 50), row(2, 9.0, 1) | {"died": ["decode-0"]}]) == [True, False]


def test_simulated_beside_measured() -> None:
    result = example()
    row = {"prefill": 1, "decode": 1, "died": [], "ttft_ms": {"p50": 150.0, "p99": 150.0},
           "itl_ms": {"p50": 25.0, "p99": None}, "good_share": 1.0}
    others = [row | {"decode": 2}, row | {"died": ["decode-0"]}]
    assert compared(others, result, POOLS) is None, "pools that were not measured"

    def pairs(pools: Pools) -> list[dict[str, Any]]:
        found = compared([*others, row], result, pools)
        assert found is not None
        return found

    found = {one["name"]: one["ratio"] for one in pairs(POOLS)}
    assert found["ttft_ms p50"] == pytest.approx(1.5)
    assert found["itl_ms p50"] == pytest.approx(1.0)
    assert found["itl_ms p99"] is None
    good = [pairs(replace(POOLS, ttft_target_ms=ms))[-1]["measured"] for ms in (50.0, 500.0)]
    assert good == [0.0, 1.0], "by the targets of the simulation, whatever those of the measurement were"


def test_the_best_ratio_of_as_many_workers() -> None:
    def row(prefill: int, decode: int, good: int, ttft: float | None = 1.0, died: tuple[str, ...] = ()
            ) -> dict[str, Any]:
        return {"prefill": prefill, "decode": decode, "good": good, "good_share": good / 10, "ttft_ms": {"p99": ttft},
                "died": list(died)}

    rows = [row(1, 1, 9), row(1, 2, 5), row(2, 1, 5, 0.5), row(1, 2, 9, died=("decode-0",)), row(1, 3, 0, None),
            row(2, 2, 0, 3.0)]
    assert [(one["workers"], one["prefill"], one["decode"], one["of"]) for one in best_ratios(rows)] == [
        (3, 2, 1, 2), (4, 2, 2, 2),
    ]


def test_requests_of_one_moment_have_a_goodput() -> None:
    found = run(POOLS, [traveller(5.0, 10, 3) for _ in range(4)])
    assert found["goodput_per_s"] == pytest.approx(4 / found["span_s"])


def test_the_caches_of_the_pools_are_as_large_as_they_are_told() -> None:
    one, other = (tuple(bytes([n]) * 16 for n in range(first, first + 8)) for first in (0, 8))

    def cached_again(num_prefill_blocks: int | None) -> int:
        """Of the same prompt twice, with another one between."""
        three = [Traveller(10.0 * number, Prompt(num_tokens=8 * 64 + 1, hashes=hashes), 2, 2)
                 for number, hashes in enumerate((one, other, one))]
        World(replace(POOLS, num_prefill_blocks=num_prefill_blocks, local_tokens=0), COST, three).run()
        return three[-1].num_cached

    assert [cached_again(blocks) for blocks in (None, 12, 9)] == [8 * 64, 4 * 64, 64]


def test_the_prefill_pool_pays_for_input_and_the_decode_pool_for_output() -> None:
    row = {"prefill": 2, "decode": 3, "span_s": 1800.0, "prompt_tokens": 4_000_000, "completion_tokens": 1_000_000,
           "good": 500}
    cost = Prices(device_hour=2.0, prefill_devices=4, decode_devices=8).of(row)
    assert cost == {
        "device_hours": 16.0, "per_million_input": 2.0, "per_million_output": 24.0, "per_thousand_good_requests": 64.0,
    }
    nothing = Prices(device_hour=2.0).of({**row, "prompt_tokens": 0, "completion_tokens": 0, "good": 0})
    assert list(nothing.values())[1:] == [None, None, None]


def test_a_cost_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    cost = replace(COST, decode_spread=(0.9, 1.0, 1.4))
    file.write_text(json.dumps(cost.to_json()))
    assert read_cost(file) == cost
    with pytest.raises(NotFound, match="no cost model"):
        read_cost(tmp_path / "none")


@pytest.mark.parametrize(("change", "sentence"), [
    ({"prefill_ms_per_token": -1}, "prefill_ms_per_token must be a number"), ({"weight": 1}, "unknown: weight"),
    ({"decode_spread": []}, "1 to 1000 numbers"), ({"tokens_per_step": 0}, "above 0"),
    ({"door_ms": "3"}, "door_ms must be a number"), ({"decode_step_ms": None}, "decode_step_ms"),
    ({"handoff_ms": True}, "handoff_ms must be a number"),
])
def test_a_broken_cost_model_is_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        CostModel.from_json({**COST.to_json(), "first_late": [-1.0], "decode_spread": [1.0], **change})


@pytest.mark.parametrize("text", ["1", "1:0", "a:b", "4000:4000", "-1:2"])
def test_pools_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--pools must be P:D"):
        parse_pools(text)
    with pytest.raises(InvalidArgument, match="--fail must be"):
        parse_failure(text, back_after_s=1.0)


def test_the_command_plays_all_ratios(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(COST.to_json()))
    finished = run_command(
        "simulate", "capacity", "--cost", file, "--kind", "short", "--requests", "30", "--rate", "5", "--workers", "3",
        "--fail", "decode-0@2", "--device-hour", "0.5", "--json",
    )
    assert finished.code == 0, finished.stderr
    rows = finished.document["rows"]
    assert [(row["prefill"], row["decode"], row["died"]) for row in rows] == [
        (1, 2, []), (1, 2, ["decode-0"]), (2, 1, []), (2, 1, ["decode-0"]),
    ]
    assert any(row["front"] for row in rows)
    assert all(row["cost"]["device_hours"] == pytest.approx(3 * row["span_s"] / 3600) for row in rows)
    assert all(row["finished"] + row["refused"] + row["failed"] == 30 for row in rows)
    assert finished.document["compared"] is None
    assert [(one["workers"], one["of"]) for one in finished.document["best"]] == [(3, 2)]
    assert finished.document["worker"]["cache_tokens"] == 100_000 // 64 * 64


def test_a_worker_that_is_not_there_does_not_die(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(COST.to_json()))
    load = ("simulate", "capacity", "--cost", file, "--kind", "short", "--requests", "20", "--rate", "5")
    finished = run_command(*load, "--workers", "3", "--fail", "decode-1@2", "--json")
    assert [(row["prefill"], row["decode"], row["died"]) for row in finished.document["rows"]] == [
        (1, 2, []), (1, 2, ["decode-1"]), (2, 1, []),
    ]
    too_small = run_command(*load, "--pools", "1:1", "--cache-tokens", "1")
    assert "1:1: 0 of 20 requests were refused, 20 failed" in too_small.stdout
    finished = run_command(*load, "--pools", "1:1", "--fail", "decode-1@2")
    assert (finished.code, "none of these pools" in finished.stderr) == (2, True)
    finished = run_command(*load, "--pools", "1:1", "--fail", "decode-0@90000", "--json")
    assert [row["died"] for row in finished.document["rows"]] == [[]]
    assert "had ended before" in finished.stderr


@pytest.mark.parametrize(("flags", "said"), [
    (("--rate", "inf"), "--rate"), (("--back-after", "inf"), "--back-after"), (("--max-queued-ms", "inf"), "a number"),
    (("--write-cost", "/nowhere/cost.json"), "cannot write"),
])
def test_what_cannot_be_is_said_before_anything_is_played(flags: tuple[str, ...], said: str) -> None:
    finished = run_command("simulate", "capacity", "--hardware", "h800", "--pools", "1:1", *flags)
    assert (finished.code, said in finished.stderr) == (2, True), finished.stderr


def test_the_command_needs_costs_and_pools(tmp_path: Path) -> None:
    assert "give one of --fit RESULT, --cost FILE and --hardware" in run_command("simulate", "capacity").stderr
