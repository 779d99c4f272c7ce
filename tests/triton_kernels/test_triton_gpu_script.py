"""The script for a GPU: says when there is none, loses nothing to what fails, goes through on tiny shapes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pd_engine.model.config import ModelConfig
from support import triton_shim  # noqa: F401  (before any module with kernels)
from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "kernels" / "benchmarks"))

from gpu_bench import main as gpu_main  # isort: skip
from gpu_bench import cluster, report, roofline  # isort: skip
from gpu_bench.bench_cases import BenchCase, Goal, bench_cases  # isort: skip
from gpu_bench.checks import Check, Findings  # isort: skip
from gpu_bench.device_engine import V3_WIDTH  # isort: skip
from gpu_bench.shapes import Maker  # isort: skip
from gpu_bench.steps import Clock, Step, take  # isort: skip
from gpu_bench.supervise import supervise  # isort: skip
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


def nothing_else(monkeypatch: pytest.MonkeyPatch, checks: list[Check], num_cases: int = 0) -> list[BenchCase]:
    """A run has these checks, a model end to end that is none, and so many timings; returns the latter."""
    monkeypatch.setattr(gpu_main.checks, "checks", lambda device, tiny: checks)
    monkeypatch.setattr(gpu_main, "_end_to_end", lambda device, tiny: {"requests": 0})
    cases = bench_cases(gpu_main.TINY_DIMS, tiny=True)[:num_cases]
    monkeypatch.setattr(gpu_main, "bench_cases", lambda *sizes, **options: cases)
    monkeypatch.setattr(gpu_main, "measure", lambda calls, device: Timing(
        median_us=1.0, spread=0.0, num_replays=1, calls_a_replay=1))
    return cases


def fail() -> None:
    raise AssertionError("planted")


def test_what_fails_costs_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A check, and a case's inputs; both files say so."""
    checks = [Check(name="bad", run=fail), Check(name="good", run=lambda: None)]
    cases = nothing_else(monkeypatch, checks, num_cases=3)
    broken = dataclasses.replace(cases[1], prepare=lambda make: fail())
    monkeypatch.setattr(gpu_main, "bench_cases", lambda *sizes, **options: [cases[0], broken, cases[2]])
    document = gpu_main.run(CPU, Clock(math.inf), tiny=True, save=lambda document: report.write(document, tmp_path))
    assert document["failed"]
    assert document["checks"] == ["good"]
    assert document["end_to_end"] == {"requests": 0}
    assert [row["name"] for row in document["timings"]] == [cases[0].name, cases[2].name]
    assert [error.splitlines()[0] for error in document["errors"].values()] == ["AssertionError: planted"] * 2
    assert document["left_out"] == []
    assert document["running"] is None
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8")) == document
    assert "| check: bad | AssertionError: planted |" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_what_led_to_an_error_is_kept(tmp_path: Path) -> None:
    """As where an error is handled, and that fails too."""
    def run() -> None:
        try:
            fail()
        except AssertionError:
            raise TypeError("while it was handled " + 5000 * "x" + " the end")  # noqa: B904  (as it happens)

    document = report.empty(CPU, is_dry_run=True)
    take([Step(name="a", run=run)], document, Clock(1000), lambda document: None, CPU)
    words, _, trace = document["errors"]["a"].partition(report.TRACE)
    assert words.startswith("TypeError: while it was handled")
    assert words.endswith("the end")
    assert "AssertionError: planted" in trace
    page = report.markdown(document)
    assert "AssertionError: planted" in page.partition("| a | TypeError")[2]


def test_what_workers_log_of_a_failed_step_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_bench import end_to_end

    def compute(self: object, chunks: object) -> None:
        raise LookupError("planted")

    monkeypatch.setattr(end_to_end.PrefillRunner, "_compute", compute)
    with pytest.raises(AssertionError, match="LookupError: planted"):
        end_to_end.run(CPU, tiny=True)


def test_a_check_names_all_that_is_wrong() -> None:
    findings = Findings()
    findings.look("one", fail)
    findings.look("two", lambda: None)
    findings.look("three", lambda: [][0])
    with pytest.raises(AssertionError, match="one: AssertionError: planted; three: IndexError"):
        findings.end()


def test_a_run_goes_on_where_another_was_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checks and figures that are there are not made again; other code's result counts not."""
    runs: list[str] = []
    results = {"good": None, "bad": "AssertionError: planted"}

    def run(name: str) -> None:
        runs.append(name)
        assert results[name] is None, "planted"

    nothing_else(monkeypatch, [Check(name=name, run=partial(run, name)) for name in results], num_cases=2)
    monkeypatch.setattr(gpu_main, "measure", lambda calls, device: runs.append("timing") or Timing(
        median_us=1.0, spread=0.0, num_replays=1, calls_a_replay=1))
    identity = report.identity(CPU) | {"sources": "abc"}
    monkeypatch.setattr(report, "identity", lambda device: identity)

    def go_on(seconds: float, identity: report.Document = identity, *, resumed: bool = True) -> report.Document:
        """`resumed`: by somebody who starts the script again, so that what has failed is tried again."""
        runs.clear()
        known = report.read_same(tmp_path, identity)
        if known is not None and resumed:
            known["errors"] = {}
        return gpu_main.run(CPU, Clock(seconds), tiny=True, known=known,
                            save=lambda document: report.write(document, tmp_path))

    assert go_on(0)["left_out"] == ["check: good", "check: bad", "ceilings", "end_to_end", *TWO_CASES]
    assert runs == []
    assert go_on(1000)["failed"]
    assert runs == ["good", "bad", "timing", "timing"]
    assert go_on(1000, resumed=False)["failed"]
    assert runs == []
    results["bad"] = None
    whole = go_on(1000)
    assert runs == ["bad"]
    assert (len(whole["checks"]), len(whole["timings"]), whole["left_out"], whole["failed"]) == (2, 2, [], False)
    go_on(1000, identity | {"commit": "def"})
    assert runs == []
    go_on(1000, identity | {"sources": "def"})
    assert runs == ["good", "bad", "timing", "timing"]


TWO_CASES = [f"{case.op}, {case.name}, {case.dtype}" for case in bench_cases(gpu_main.TINY_DIMS, tiny=True)[:2]]


class Ends(NamedTuple):
    """How a process ends, and what it was at."""

    status: int
    running: str | None


@pytest.mark.parametrize(("ends", "status", "errors"), [
    ([Ends(0, None)], 0, {}),
    ([Ends(-signal.SIGSEGV, "a"), Ends(1, None)], 1, {"a": "it ended the process: SIGSEGV"}),
    ([Ends(-signal.SIGALRM, "a"), Ends(7, "b"), Ends(1, None)], 1,
     {"a": "it took too long", "b": "it ended the process: exit status 7"}),
    ([Ends(3, None), Ends(1, None)], 1, {}),  # the process has noted what has broken the GPU
    ([Ends(-signal.SIGSEGV, None)], 1, {}),
])
def test_a_process_that_ends_early_is_followed_by_another(
    tmp_path: Path, ends: list[Ends], status: int, errors: dict[str, str]
) -> None:
    left = list(ends)

    def start(seconds: float, is_next: bool) -> int:
        assert is_next == (len(left) < len(ends))
        end = left.pop(0)
        document = report.read(tmp_path) or report.empty(CPU, is_dry_run=True)
        report.write(document | {"running": end.running}, tmp_path)
        return end.status

    assert supervise(start, Clock(1000), tmp_path) == status
    assert left == []
    document = report.read(tmp_path)
    assert document is not None
    assert (document["errors"], document["failed"], document["running"]) == (errors, bool(errors), None)


def test_no_process_is_started_when_the_time_is_over(tmp_path: Path) -> None:
    def start(seconds: float, is_next: bool) -> int:
        assert not is_next
        report.write(report.empty(CPU, is_dry_run=True) | {"running": "a"}, tmp_path)
        return -signal.SIGKILL

    assert supervise(start, Clock(1), tmp_path) == 1
    assert "no time to start again" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_a_step_that_hangs_ends_its_process(tmp_path: Path) -> None:
    """By a signal that nobody handles, so that it works within a library too."""
    program = """
import sys, time
from pathlib import Path
import torch
from gpu_bench import report
from gpu_bench.steps import Clock, Step, take
document = report.empty(torch.device("cpu"), is_dry_run=True)
steps = [Step(name="hangs", run=lambda: time.sleep(600), limit_s=1)]
take(steps, document, Clock(1000), lambda document: report.write(document, Path(sys.argv[1])), torch.device("cpu"))
"""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, tmp_path], env=environment, check=False)
    assert done.returncode == -signal.SIGALRM
    document = report.read(tmp_path)
    assert document is not None
    assert document["running"] == "hangs"


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
    take([gpu_main._part("cluster", document, cluster.run_cluster)], document, Clock(1000), lambda document: None, CPU)
    assert document["failed"] == (error is not None)
    assert error in document["errors"]["cluster"] if error else document["cluster"]["verify"] == {"equal": True}


def test_a_cluster_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "NEEDED", ("no-such-distribution",))
    document = report.empty(CPU, is_dry_run=True)
    take([gpu_main._part("cluster", document, cluster.run_cluster)], document, Clock(1000), lambda document: None, CPU)
    assert not document["failed"]
    assert "no-such-distribution" in document["left_out"][0]


def others_than(*distributions: str) -> set[str]:
    """Modules of all that is installed, but for these distributions and what they require."""
    kept: set[str] = set()
    left = list(distributions)
    while left:
        name = canonicalize_name(left.pop())
        if name not in kept:
            kept.add(name)
            needs = [Requirement(line) for line in requires(name) or []]
            left += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {
        module for module, owners in packages_distributions().items()
        if not kept & {canonicalize_name(owner) for owner in owners} and not (ROOT / "kernels" / module).is_dir()
        and not (ROOT / "ops" / module).is_dir() and not (ROOT / module).is_dir()
    }


WITH_TORCH_AND_TRITON_ALONE = """
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # None: cannot be imported
from support import triton_shim
import torch
from gpu_bench import main, stand_ins
assert set(stand_ins.install()) == set(stand_ins.NAMES)
from gpu_bench.end_to_end import V3_WIDTH, ModelConfig, run
config = ModelConfig.parse(V3_WIDTH)
result = {name: value for name, value in vars(config).items() if name != "rope_scaling"}
played = run(torch.device("cpu"), tiny=True) if "run" in sys.argv else None
print(json.dumps([result, vars(config.rope_scaling), played]))
"""


@pytest.mark.parametrize("computes", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_nothing_is_needed_beside_torch_triton_and_numpy(computes: bool) -> None:
    """Neither for the checks and timings nor for the model end to end, whose config has the same numbers then."""
    blocked = others_than("torch", "triton", "numpy")
    assert {"grpc", "pydantic", "safetensors", "ray"} <= blocked
    program = [sys.executable, "-c", WITH_TORCH_AND_TRITON_ALONE, json.dumps(sorted(blocked))]
    done = subprocess.run(
        [*program, *(["run"] if computes else [])],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    config, scaling, result = json.loads(done.stdout)
    expected = ModelConfig.parse(V3_WIDTH).model_dump()
    assert scaling == expected.pop("rope_scaling")
    assert config == expected
    assert not computes or result["tokens"] == 6


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_dry_run_goes_through(tmp_path: Path) -> None:
    done = run_script("--dry-run", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert document["dry_run"]
    assert document["errors"] == {}
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
        "identity": {"date": "D", "gpu": "G", "commit": "C", "torch": "T", "triton": "3"}, "errors": {},
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
    document |= {"errors": {"check: ops: odd": "wrong"}, "ceilings": {}}
    document["identity"] |= {"commit": None, "sources": "abc"}  # type: ignore[operator]
    page = roofline.page(document)
    assert "sources abc" in page
    assert "**Checks failed, so that figures may be of wrong results**: ops: odd." in page
