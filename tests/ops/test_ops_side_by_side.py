"""`ops/peers/side_by_side.py`: what is there is not measured again, and what the page says. No peer is started."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_engine.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from pd_ops.bench.side_by_side import turns
from pd_ops.bench.side_by_side.long_prompt import disturbance
from pd_ops.bench.side_by_side.report import markdown, plot, read_turns
from pd_ops.bench.side_by_side.systems import Serving, Stage, System
from pd_ops.bench.side_by_side.turns import FAILED_FILE, STALL_FILE, Plan, keep_plan, run_folder, turn_folder
from support.serve_results import write_example

PLAN = Plan(
    load=("--kind", "short"), rates=(1.0, 4.0), seconds=10.0, limit_s=30.0, ttft_target_ms=500.0, itl_target_ms=100.0,
    rounds=1, systems=tuple(system.value for system in System), long_prompts=1, stream_tokens=100,
)
STALL = {"quiet_p50_ms": 5.0, "quiet_p99_ms": 10.0, "during_p50_ms": 6.0, "during_p99_ms": 12.0, "ratio": 1.2,
         "first_token_ms": 400.0}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(model=tmp_path, dtype="bf16", max_context=4096, cores=(0, 1), peers_python=tmp_path / "python")


def fill(folder: Path, system: System, ttft_s: float, number: int = 1) -> None:
    for rate in PLAN.rates:
        run = run_folder(folder, number, system, rate)
        write_example(run)
        change(run, "summary", ttft_ms={"p50": 1e3 * ttft_s, "p99": 2e3 * ttft_s})
    (turn_folder(folder, number, system) / STALL_FILE).write_text(json.dumps(STALL))


def change(run: Path, part: str, **values: Any) -> None:
    result = json.loads((run / "result.json").read_text())
    result[part] |= values
    (run / "result.json").write_text(json.dumps(result))


def test_a_gap_that_reaches_into_a_long_prompt_is_of_it() -> None:
    """Every 10 ms a token, but 30 ms while a prompt is read from 1.0 to 1.6 s."""
    at_s, arrivals = 0.0, []
    while at_s < 3.0:
        arrivals.append((at_s, 1))
        at_s += 0.03 if 1.0 <= at_s < 1.6 else 0.01
    found = disturbance([arrivals, [(0.5, 1), *((0.5 + 0.01 * n, 1) for n in range(1, 40))]], [(1.0, 1.6)])
    assert found.quiet_p50_ms == pytest.approx(10.0)
    assert found.during_p50_ms == pytest.approx(30.0)
    assert found.ratio == pytest.approx(3.0)
    assert found.first_token_ms == pytest.approx(600.0)


def test_streams_that_ended_too_early_tell_nothing() -> None:
    with pytest.raises(FailedPrecondition, match="too few to tell"):
        disturbance([[(0.0, 1), (0.1, 1)]], [(5.0, 6.0)])


def test_the_page_has_every_system_and_says_what_is_missing(tmp_path: Path, stage: Stage) -> None:
    keep_plan(tmp_path, PLAN, stage)
    fill(tmp_path, System.PD_RELAY, 0.1)
    fill(tmp_path, System.ONE_POOL, 0.2)
    lost = turn_folder(tmp_path, 1, System.VLLM)
    lost.mkdir(parents=True)
    (lost / FAILED_FILE).write_text("vllm-prefill did not start: /a/path has no room\n")
    found = read_turns(tmp_path)
    page = markdown(found, "plot.svg")
    assert page.count("| pd-relay |") == 3  # two rates, and the long prompts
    assert "Not measured: round 1, vllm-nixl: vllm-prefill did not start (more in failed.txt of that turn)" in page
    assert "demo (weights" in page
    assert "/model/demo" not in page
    assert "weights 74469d44d404" in page
    assert "beside vLLM" not in page
    assert plot(found).count("<circle") == 2 * 2 * 3
    fill(tmp_path, System.VLLM, 0.4)
    page = markdown(read_turns(tmp_path), "plot.svg")
    assert "goodput × 1.00, TTFT p50 × 0.25" in page
    assert page.count("commit ") == 3


def test_a_ratio_to_nothing_and_rounds_of_another_commit_are_said(tmp_path: Path, stage: Stage) -> None:
    keep_plan(tmp_path, replace(PLAN, rounds=2), stage)
    for number in (1, 2):
        fill(tmp_path, System.PD_RELAY, 0.1, number)
        fill(tmp_path, System.VLLM, 0.4, number)
    for number, rate in ((1, 1.0), (1, 4.0), (2, 4.0)):
        change(run_folder(tmp_path, number, System.VLLM, rate), "summary", good_share=0.0)
    second = run_folder(tmp_path, 2, System.PD_RELAY, 4.0)
    host = json.loads((second / "result.json").read_text())["identity"]["host"]
    change(second, "identity", host=host | {"commit": "0123456789ab"})
    page = markdown(read_turns(tmp_path), "plot.svg")
    assert "goodput × 1.00 (of 1 of 2 rounds: in the others vLLM has none), TTFT" in page
    assert "goodput: vLLM has none in any round, TTFT" in page
    assert "> pd-relay from round 2 on: " in page
    assert page.count("commit 0123456789ab") == 1


def test_another_plan_does_not_go_on_in_the_same_folder(tmp_path: Path, stage: Stage) -> None:
    keep_plan(tmp_path, PLAN, stage)
    keep_plan(tmp_path, PLAN, stage)
    with pytest.raises(InvalidArgument, match="another plan"):
        keep_plan(tmp_path, replace(PLAN, seconds=11.0), stage)
    with pytest.raises(NotFound, match="no figure yet"):
        read_turns(tmp_path)


async def test_only_what_is_not_there_yet_is_measured(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One system has all its results, one does not start, of one a single run is left."""
    started: list[System] = []
    runs: list[tuple[str, ...]] = []

    @asynccontextmanager
    async def serving(system: System, stage: Stage, log_directory: Path) -> AsyncIterator[Serving]:
        started.append(system)
        if system is System.VLLM:
            raise Unavailable("it did not start")
        yield Serving(url="http://localhost:1", flags=())

    async def serve_turn(flags: Any, log: Path, limit_s: float) -> None:
        runs.append(tuple(flags))

    monkeypatch.setattr(turns, "serving", serving)
    monkeypatch.setattr(turns, "serve_turn", serve_turn)
    fill(tmp_path, System.PD_RELAY, 0.1)
    fill(tmp_path, System.ONE_POOL, 0.1)
    (run_folder(tmp_path, 1, System.ONE_POOL, 4.0) / "result.json").unlink()
    await turns.take_turns(tmp_path, PLAN, stage, lambda line: None)
    assert started == [System.ONE_POOL, System.VLLM]
    [warm_up, run] = runs
    assert "--concurrency" in warm_up
    assert run[run.index("--rate") + 1] == "4.0"
    assert run[run.index("--requests") + 1] == "40"
    assert (turn_folder(tmp_path, 1, System.VLLM) / FAILED_FILE).read_text() == "it did not start\n"
