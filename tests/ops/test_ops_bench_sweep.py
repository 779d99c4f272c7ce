"""`bench sweep`: one setting at a time, resumable, with the front; one real cluster, never speed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pd_engine.errors import InvalidArgument, Unavailable
from pd_ops.bench import sweep as module
from pd_ops.bench.energy import EnergyMeter
from pd_ops.bench.sweep import SweepPlan, Variant, keep_plan, parse_vary, read_rows, sweep, text
from pd_ops.bench.sweep_plot import plot
from support.commands import run_command
from support.fork_server import start_fork_server
from support.leaks import assert_nothing_left
from support.serve_results import write_example

PLAN = SweepPlan(
    load=("--kind", "short"), config=None, overrides={}, limit_s=30.0,
    variants=parse_vary(["decode.workers=1,2", "engine.chunk_tokens=64"]),
)


def test_a_value_is_a_variant_and_the_base_comes_first() -> None:
    assert [variant.name for variant in PLAN.variants] == [
        "base", "decode.workers=1", "decode.workers=2", "engine.chunk_tokens=64",
    ]
    assert PLAN.variants[2].overrides == {"decode.workers": 2}
    assert parse_vary(["engine.prefix_cache=false"])[1].value is False


@pytest.mark.parametrize("broken", [
    "decode.workers", "=1", "decode.workers=", "decode.workers=[]", "decode.workers={", "decode.workers=[1,2]",
])
def test_what_is_no_setting_with_values(broken: str) -> None:
    with pytest.raises(InvalidArgument, match="--vary "):
        parse_vary([broken])


def test_what_cannot_be_written_or_read_is_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{")
    (tmp_path / "plan.json").write_text("{")
    vary, out = ("--vary", "decode.workers=1"), ("--out", tmp_path / "new")
    for flags, said in (
        ((*out, "--load", "'"), "--load must be flags"), (("--out", tmp_path / "file"), "cannot be used for results"),
        (("--out", tmp_path), "cannot be used for results"), ((*out, "--page", tmp_path), "cannot write"),
        ((*out, "--page", tmp_path / "nowhere" / "page.md"), "cannot write"),
    ):
        finished = run_command("bench", "sweep", *vary, *flags)
        assert (finished.code, said in finished.stderr) == (2, True), finished.stderr


def test_a_setting_that_there_is_not_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="workerz"):
        keep_plan(tmp_path, replace(PLAN, variants=parse_vary(["decode.workerz=1"])))
    keep_plan(tmp_path, PLAN)
    with pytest.raises(InvalidArgument, match="another plan"):
        keep_plan(tmp_path, replace(PLAN, limit_s=31.0))


async def test_only_what_is_not_there_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seats_of: list[int] = []

    @asynccontextmanager
    async def running(settings: Any, log_directory: Path, seats: Sequence[Any]) -> AsyncIterator[dict[str, str]]:
        seats_of.append(len(seats))
        if settings.engine.chunk_tokens == 64:
            raise Unavailable("it did not start")
        yield {"grpc": "localhost:1"}

    async def serve_turn(flags: Sequence[str], log: Path, limit_s: float) -> None:
        if "--out" in flags:
            write_example(Path(flags[-1]))

    monkeypatch.setattr(module, "running", running)
    monkeypatch.setattr(module, "serve_turn", serve_turn)
    keep_plan(tmp_path, PLAN)
    await sweep(tmp_path, PLAN, lambda line: None)
    assert seats_of == [2, 2, 3, 2]
    await sweep(tmp_path, PLAN, lambda line: None)
    assert seats_of == [2, 2, 3, 2, 2]  # the one that failed, once more
    rows = read_rows(tmp_path, PLAN)
    assert [(row["variant"], row["decode"], row["front"]) for row in rows] == [
        ("base", 1, True), ("decode.workers=1", 1, True), ("decode.workers=2", 2, False),
    ]
    assert rows[2]["worker_s_per_request"] == pytest.approx(1.5 * rows[0]["worker_s_per_request"])
    assert "not measured: engine.chunk_tokens=64: it did not start" in text(tmp_path, PLAN, rows)
    assert "/" not in text(tmp_path, PLAN, rows).partition("(weights")[0], "a page names no folder of this machine"
    drawn = ElementTree.fromstring(plot([*rows, {**rows[0], "goodput_per_s": 2 * rows[0]["goodput_per_s"]}]))
    widths = [float(bar.get("width", "nan")) for bar in drawn.iterfind("{*}rect") if bar.get("height") != "100%"]
    assert widths[3] == pytest.approx(2 * widths[0], abs=0.2)  # a tenth of a pixel is drawn


def test_joules_where_there_is_a_meter(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path).joules() is None
    zones = [tmp_path / f"intel-rapl:{number}" for number in range(2)]
    for zone in zones:
        zone.mkdir()
        (zone / "energy_uj").write_text("5000000\n")
        (zone / "max_energy_range_uj").write_text("9000000\n")
    meter = EnergyMeter(tmp_path)
    (zones[0] / "energy_uj").write_text("7000000\n")
    (zones[1] / "energy_uj").write_text("1000000\n")  # it has begun anew
    assert meter.joules() == pytest.approx(2.0 + 5.0)
    (zones[1] / "energy_uj").unlink()
    assert meter.joules() is None


@pytest.mark.slow
@pytest.mark.timeout(900)  # two clusters and four commands, on a busy machine
async def test_a_sweep_of_real_clusters(tmp_path: Path) -> None:
    load = "--kind short --requests 4 --rate 5 --length-scale 0.1 --ttft-target-ms 600000 --itl-target-ms 600000"
    start_fork_server()
    async with assert_nothing_left():
        finished = await asyncio.to_thread(
            run_command, "bench", "sweep", "--vary", "engine.chunk_tokens=64", "--load", load,
            "--out", tmp_path / "results", "--page", tmp_path / "page.md", "--json", timeout_s=800.0,
        )
    assert finished.code == 0, finished.stderr
    rows = finished.document["rows"]
    assert [(row["variant"], row["good_share"]) for row in rows] == [("base", 1.0), ("engine.chunk_tokens=64", 1.0)]
    assert "engine.chunk_tokens=64" in (tmp_path / "page.md").read_text()
    assert json.loads((tmp_path / "results" / "plan.json").read_text())["variants"][1]["value"] == 64


def test_a_variant_of_the_base_is_the_base() -> None:
    assert Variant().overrides == {}
