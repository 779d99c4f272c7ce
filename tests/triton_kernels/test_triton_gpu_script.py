"""The script for a GPU: says when there is none, times nothing after a failed check, goes through on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import triton_shim  # noqa: F401  (before any module with kernels)
from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "kernels" / "benchmarks"))

from gpu_bench import main as gpu_main  # isort: skip
from gpu_bench import cluster, report, roofline  # isort: skip
from gpu_bench.bench_cases import BenchCase, Goal, bench_cases  # isort: skip
from gpu_bench.checks import Check  # isort: skip
from gpu_bench.shapes import Maker  # isort: skip
from gpu_bench.timing import Timing  # isort: skip

SCRIPT = ROOT / "kernels" / "benchmarks" / "gpu.sh"
CPU = torch.device("cpu")


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([SCRIPT, *arguments], env=environment | {"PYTHON": sys.executable}, capture_output=True,
                          text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run_script()
    assert done.returncode == 2
    assert "need an NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failed_check_leaves_out_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(gpu_main.checks, "checks", lambda device, tiny: [
        Check(name="good", run=lambda: None), Check(name="bad", run=fail)])
    document = gpu_main.run(CPU, gpu_main.Clock(1000), tiny=True)
    assert document["failed"]
    assert [check["error"] for check in document["checks"]] == [None, "AssertionError: planted"]
    assert document["timings"] == []
    assert document["left_out"] == ["all timings: a check failed"]


def test_a_run_goes_on_where_another_was_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checks and figures that are there are not made again; what failed is, and another commit's result counts not."""
    runs: list[str] = []
    results = {"good": None, "bad": "AssertionError: planted"}

    def run(name: str) -> None:
        runs.append(name)
        assert results[name] is None, "planted"

    monkeypatch.setattr(gpu_main.checks, "checks", lambda device, tiny: [
        Check(name=name, run=lambda name=name: run(name)) for name in results])
    monkeypatch.setattr(gpu_main, "_end_to_end", lambda device, tiny: {"requests": len(runs)})
    cases = bench_cases(gpu_main.TINY_DIMS, tiny=True)[:2]
    monkeypatch.setattr(gpu_main, "bench_cases", lambda *sizes, **options: cases)
    monkeypatch.setattr(gpu_main, "measure", lambda calls, device: runs.append("timing") or Timing(
        median_us=1.0, spread=0.0, num_replays=1, calls_a_replay=1))
    identity = report.identity(CPU) | {"commit": "abc"}
    monkeypatch.setattr(report, "identity", lambda device: identity)

    def go_on(seconds: float, identity: report.Document = identity) -> report.Document:
        runs.clear()
        return gpu_main.run(CPU, gpu_main.Clock(seconds), tiny=True, known=report.read(tmp_path, identity),
                            save=lambda document: report.write(document, tmp_path))

    assert go_on(1000)["failed"]
    assert runs == ["good", "bad"]
    results["bad"] = None
    assert not go_on(0)["failed"]
    assert runs == ["bad"]
    assert len(go_on(1000)["timings"]) == 2
    assert runs == ["timing", "timing"]
    whole = go_on(1000)
    assert runs == []
    assert (len(whole["checks"]), len(whole["timings"]), whole["left_out"]) == (2, 2, [])
    go_on(0, identity | {"commit": "def"})
    assert runs == ["good", "bad"]


@pytest.mark.parametrize(("code", "stdout", "stderr", "error"), [
    (0, '{"equal": true}', "", None), (1, "{}", "2 of 8 differ", "exit status 1: 2 of 8 differ"),
])
def test_a_cluster_that_differs_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, code: int, stdout: str, stderr: str, error: str | None
) -> None:
    monkeypatch.setattr(cluster, "version", lambda name: "1")
    monkeypatch.setattr(cluster.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(
        command, code, stdout, stderr))
    document = report.empty(CPU, is_dry_run=True)
    result = gpu_main._part("cluster", document, cluster.run_cluster)
    assert document["failed"] == (error is not None)
    assert error in result["error"] if error else result["verify"] == {"equal": True}


def test_a_cluster_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "NEEDED", ("no-such-distribution",))
    document = report.empty(CPU, is_dry_run=True)
    assert gpu_main._part("cluster", document, cluster.run_cluster) is None
    assert not document["failed"]
    assert "no-such-distribution" in document["left_out"][0]


def test_what_does_not_fit_into_the_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_main.checks, "checks", lambda device, tiny: [])
    monkeypatch.setattr(gpu_main, "_end_to_end", lambda device, tiny: {"requests": 0})
    document = gpu_main.run(CPU, gpu_main.Clock(0), tiny=True)
    assert len(document["left_out"]) == len(bench_cases(gpu_main.TINY_DIMS, tiny=True))
    assert document["timings"] == []
    assert not document["failed"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_dry_run_goes_through(tmp_path: Path) -> None:
    done = run_script("--dry-run", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert document["dry_run"]
    assert all(check["error"] is None for check in document["checks"])
    assert len(document["timings"]) == len(bench_cases(gpu_main.TINY_DIMS, tiny=True))
    assert document["end_to_end"]["tokens"] == 6
    assert document["left_out"] == []
    assert "no figure in it means anything" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_every_op_of_the_compile_gate_is_timed() -> None:
    from gpu_bench.production import cases

    assert {case.op for case in cases()} <= {case.op for case in bench_cases()}


@pytest.mark.parametrize("case", bench_cases(gpu_main.TINY_DIMS, tiny=True), ids=lambda case: f"{case.op} {case.name}")
def test_work_is_counted(case: BenchCase) -> None:
    assert case.num_bytes > 0
    assert case.flops > 0 or case.op in ("block_copy", "embed", "verify_drafts")
    assert case.goal is Goal.NONE or case.goal_value > 0
    assert case.prepare(Maker.on("meta"))


# By hand, at DeepSeek-V3's shapes: 128 heads, latents of 512 + 64 numbers in 2 bytes, hidden size 7168, 256 experts of
# width 2048 of which a token has 8 and the shared one.
BY_HAND = {
    # 2 · 128 heads · 4096 keys · (576 + 512); 4096 slots of 1152 bytes, 128 · (576 + 512) numbers in and out
    ("mla_decode", "batch 1, context 4096, 1 query tokens"): (1_140_850_688, 4_997_120, "compute", 1.1524),
    # 2 · 256 · 7168 a token; 4096 · 7168 numbers, the router's weights, and 8 weights and ids of 4 bytes a token
    ("moe_gate", "4096 tokens"): (15_032_385_536, 62_652_416, "compute", 15.1842),
    # 9 experts a token, 3 products each, 2 · 7168 · 2048
    ("grouped_gemm", "4096 tokens, 256 experts"): (3_246_995_275_776, 22_754_099_200, "memory", 4740.4373),
    # read x and the residual, write the sum and the norm: 4 · 4096 · 7168 · 2 bytes
    ("rms_norm", "with addition, 4096 rows"): (6 * 29_360_128, 234_881_024, "memory", 48.9335),
    # 256 rows of 129,280 float32, read once
    ("sample", "temperature, 256 rows"): (100 * 33_095_680, 132_382_720, "compute", 49.3966),
    ("verify_drafts", "256 sequences"): (0, 12_288, "memory", 0.0026),
}


@pytest.mark.parametrize(("op", "call"), BY_HAND)
def test_floors_are_those_computed_by_hand(op: str, call: str) -> None:
    [row] = [row for row in roofline.rows(None) if (row["op"], row["call"]) == (op, call) and row["dtype"] != "fp8"]
    flops, num_bytes, bound, least_us = BY_HAND[op, call]
    assert (row["flops"], row["bytes"], row["bound_by"]) == (flops, num_bytes, bound)
    assert row["floor_us"] == pytest.approx(least_us, rel=1e-3, abs=1e-4)
    assert row["measured_us"] is row["share"] is row["goal_reached"] is None


def test_the_roofline_page_shows_the_cases() -> None:
    assert roofline.PAGE.read_text(encoding="utf-8") == roofline.page(roofline.committed())
    assert roofline.FIGURES.read_text(encoding="utf-8") == roofline.figures(roofline.committed())


def test_the_roofline_page_with_figures() -> None:
    case = next(case for case in bench_cases() if case.op == "rms_norm")
    document = {
        "identity": {"date": "D", "gpu": "G", "commit": "C", "torch": "T", "triton": "3"},
        "ceilings": {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": 7e14},
        "timings": [{"op": case.op, "name": case.name, "dtype": case.dtype, "median_us": case.num_bytes / 3e12 * 1e6}],
    }
    page = roofline.page(document)
    assert "Measured D on G, commit C" in page
    [line] = [line for line in page.splitlines() if line.startswith("| rms_norm")]
    assert "62% (goal: reached)" in line  # 3 of 4.8 TB/s; 3 of the measured 4 are more than 70 %
    assert "not measured" not in line
    document["timings"][0]["median_us"] *= 2  # type: ignore[index, operator]
    assert "(goal: missed, 0.38)" in roofline.page(document)
