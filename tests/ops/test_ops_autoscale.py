"""Sizes of pools that follow targets: bounds, hysteresis, a schedule; a steady load never moves a pool to and fro."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from datetime import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_engine.contracts import api_pb2
from pd_engine.errors import InvalidArgument
from pd_engine.settings import AutoscaleSettings, Settings, load_settings
from pd_ops.autoscale.observation import PoolLook, Pressure, look
from pd_ops.autoscale.policy import PoolMemory, decide
from pd_ops.autoscale.schedule import Bounds, bounds_at
from pd_ops.cluster.control_messages import ScaleRequest
from pd_ops.commands import autoscale
from support.router_lab import eventually, router_lab

SETTINGS = AutoscaleSettings(up_after_s=10.0, down_after_s=30.0, pause_s=20.0, interval_s=5.0)


def seen(size: int, share: float | None) -> PoolLook:
    pressures = () if share is None else (Pressure(name="queue", value=share * 100, target=100.0, unit=" ms"),)
    return PoolLook(num_ready=size, pressures=pressures)


def play(load: list[float], size: int, bounds: Bounds, settings: AutoscaleSettings = SETTINGS) -> list[int]:
    """Sizes after each look at a pool whose work is shared evenly."""
    memory, sizes = PoolMemory(), []
    for number, work in enumerate(load):
        decision, memory = decide(
            seen(size, work / size), bounds, memory, settings, number * settings.interval_s
        )
        size = decision.size
        sizes.append(size)
    return sizes


@given(
    load=st.lists(st.floats(0, 50), min_size=1, max_size=60), size=st.integers(1, 12),
    least=st.integers(1, 5), more=st.integers(0, 8),
)
def test_bounds_stand_over_all(load: list[float], size: int, least: int, more: int) -> None:
    bounds = Bounds(least, least + more)
    sizes = play(load, size, bounds)
    for before, after in zip([size, *sizes], sizes, strict=False):
        assert abs(after - before) <= max(before, least), "at most twice as many, or up to the least"
        assert after >= min(before, least)
        assert after >= before - 1, "one at a time"
        assert after <= max(before, bounds.most)
    settled = play([load[-1]] * 60, size, bounds)
    assert bounds.least <= settled[-1] <= bounds.most


@given(work=st.floats(0, 30), size=st.integers(1, 12), margin=st.floats(0.05, 0.9))
def test_a_steady_load_moves_a_pool_one_way_and_then_not_at_all(work: float, size: int, margin: float) -> None:
    settings = SETTINGS.model_copy(update={"margin": margin})
    sizes = [size, *play([work] * 200, size, Bounds(1, 64), settings)]
    steps = [after - before for before, after in pairwise(sizes) if after != before]
    assert all(step > 0 for step in steps) or all(step == -1 for step in steps), sizes
    assert len(set(sizes[-40:])) == 1
    last = sizes[-1]
    assert work / last <= 1, "the target is kept"
    assert last == 1 or last == size or steps, "it does not stay too large"
    if steps and steps[-1] == -1 and last > 1:
        assert work / (last - 1) >= 1 - margin


def test_it_waits_before_it_acts_and_after() -> None:
    sizes = play([3.0] * 3, 2, Bounds(1, 8))
    assert sizes == [2, 2, 3], "10 s, in looks of 5 s"
    assert play([3.0, 1.0] * 20, 2, Bounds(1, 8)) == [2] * 40, "a spike is no load"
    grown = play([16.0] * 12, 1, Bounds(1, 64))
    assert grown == [1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8], "doubled at most, with a pause between"
    shrunk = play([0.5] * 20, 3, Bounds(1, 8))
    assert shrunk == [3] * 6 + [2] * 7 + [1] * 7, "30 s, one at a time"


def test_it_explains_itself() -> None:
    decision, memory = decide(seen(2, 1.5), Bounds(1, 2), PoolMemory(), SETTINGS, 0.0)
    assert decision.why == "queue 150 ms, target 100 ms: missed; up if it stays so for 10 s more"
    decision, memory = decide(seen(2, 1.5), Bounds(1, 2), memory, SETTINGS, 10.0)
    assert decision.size == 2
    assert decision.why == "queue 150 ms, target 100 ms: missed; but 1 to 2 workers are allowed now"
    assert decide(seen(2, None), Bounds(1, 2), PoolMemory(), SETTINGS, 0.0)[0].why == "nothing has been measured yet"
    assert decide(seen(2, 0.9), Bounds(1, 2), PoolMemory(), SETTINGS, 0.0)[0].why == "queue 90 ms, target 100 ms: kept"
    assert decide(seen(5, 0.9), Bounds(1, 2), PoolMemory(), SETTINGS, 0.0)[0].size == 4
    assert decide(seen(0, None), Bounds(2, 4), PoolMemory(), SETTINGS, 0.0)[0].size == 2


def test_day_and_night() -> None:
    settings = load_settings(None, {"autoscale.schedule": [
        {"begin": "22:00", "end": "06:00", "prefill_most": 1, "decode_least": 2},
        {"begin": "08:00", "end": "18:00", "prefill_least": 3},
    ], "autoscale.prefill_most": 2}).autoscale
    assert bounds_at("prefill", settings, time(23, 0)) == Bounds(1, 1)
    assert bounds_at("prefill", settings, time(5, 59)) == Bounds(1, 1)
    assert bounds_at("prefill", settings, time(6, 0)) == Bounds(1, 2)
    assert bounds_at("decode", settings, time(0, 0)) == Bounds(2, 4)
    assert bounds_at("prefill", settings, time(12, 0)) == Bounds(3, 3), "the least stands over the most"


def test_a_wrong_schedule_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"autoscale.schedule.0.begin"):
        load_settings(None, {"autoscale.schedule": [{"begin": "25:00", "end": "06:00"}]})
    with pytest.raises(InvalidArgument, match=r"did you mean autoscale.schedule.0.decode_most\?"):
        load_settings(None, {"autoscale.schedule": [{"begin": "22:00", "end": "06:00", "decode_mos": 3}]})
    assert Settings().autoscale.schedule == ()


def load(role: str, **fields: float) -> api_pb2.WorkerLoad:
    return api_pb2.WorkerLoad(role=role, **fields)  # type: ignore[arg-type]


def test_what_is_looked_at() -> None:
    loads = [
        load("prefill", queued_prefill_tokens=3000, prefill_tokens_per_s=1000),
        load("prefill", queued_prefill_tokens=0, prefill_tokens_per_s=2000),
        load("decode", num_blocks_total=100, num_blocks_free=60, num_running=3, itl_ms=40),
        load("decode", num_blocks_total=100, num_blocks_free=100, itl_ms=900),
    ]
    pools = look(loads, num_in_line=0, targets=SETTINGS)
    assert [(one.name, one.value) for one in pools["prefill"].pressures] == [("prefill queue", 1000.0)]
    found = {one.name: one.value for one in pools["decode"].pressures}
    assert found == {"blocks in use": pytest.approx(20.0), "between tokens": 40.0}, "idle workers have no pace"
    in_line = look(loads, num_in_line=1, targets=SETTINGS)["decode"].worst
    assert in_line is not None and in_line.share > 1
    assert look([load("prefill"), load("decode")], num_in_line=0, targets=SETTINGS)["prefill"].worst is None
    assert not math.isnan(in_line.share)


class Told:
    """An output that keeps what it is given."""

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def document(self, document: dict[str, Any]) -> None:
        self.documents.append(document)

    def text(self, text: str) -> None:
        self.lines.append(text)

    note = text


@pytest.mark.parametrize(("dry_run", "state", "expected"), [
    (False, "serving", [("prefill", 2)]), (True, "serving", []), (False, "starting", []), (True, "waiting", []),
])
async def test_a_pool_that_is_behind_grows_unless_it_is_a_dry_run(
    monkeypatch: pytest.MonkeyPatch, dry_run: bool, state: str, expected: list[tuple[str, int]]
) -> None:
    """One look at a router; a pool with a worker that is just being started is left alone."""
    asked: list[tuple[str, int]] = []

    async def ask_controller(cluster: str, request: Any, on_progress: Any = None) -> dict[str, Any]:
        if isinstance(request, ScaleRequest):
            asked.extend((role.value, size) for role, size in request.wanted().items())
        return {"workers": [
            {"id": "prefill-0", "role": "prefill", "state": state}, {"id": "d", "role": "decode", "state": "waiting"},
        ]}

    settings = AutoscaleSettings(up_after_s=0.0)
    async with router_lab() as lab:
        lab.prefill[0].loads = {"queued_prefill_tokens": 9000, "prefill_tokens_per_s": 1000.0}
        link = lab.router._registry.link("prefill-0")
        assert link is not None
        await eventually(lambda: link.loads is not None and link.loads.queued_prefill_tokens == 9000)
        monkeypatch.setattr(autoscale, "ready_state", lambda name: SimpleNamespace(grpc_address=lab.grpc_address))
        monkeypatch.setattr(autoscale, "ask_controller", ask_controller)
        told = Told()
        output: Any = told
        scaler = autoscale.Autoscaler(settings, cluster="c", dry_run=dry_run, drain_s=1.0, output=output)
        await scaler.run(1)
    assert asked == expected
    prefill = told.documents[0]["pools"]["prefill"]
    assert (prefill["size"], prefill["wanted"]) == (1, 2)
    change = "would be 1 -> 2" if dry_run else "1 -> 2"
    assert f"prefill  {change}: prefill queue 9000 ms, target 1000 ms: missed" in told.lines
    assert "decode   " in told.lines[1]
    left_alone = [line for line in told.lines if "left alone" in line]
    assert left_alone == ([] if state == "serving" else [
        f"a pool that is not whole is left alone: prefill-0 is {state}"
    ])


async def test_an_interrupt_leaves_a_change_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller finishes it: minutes, perhaps."""
    async def ask_controller(cluster: str, request: Any, on_progress: Any = None) -> dict[str, Any]:
        if isinstance(request, ScaleRequest):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        return {"workers": []}

    async with router_lab() as lab:
        monkeypatch.setattr(autoscale, "ready_state", lambda name: SimpleNamespace(grpc_address=lab.grpc_address))
        monkeypatch.setattr(autoscale, "ask_controller", ask_controller)
        told = Told()
        output: Any = told
        settings = AutoscaleSettings(prefill_least=2)
        scaler = autoscale.Autoscaler(settings, cluster="c", dry_run=False, drain_s=1.0, output=output)
        async with asyncio.timeout(60):
            await scaler.run(None)
    assert told.lines[-1].startswith("interrupted: a step that is under way is finished")
