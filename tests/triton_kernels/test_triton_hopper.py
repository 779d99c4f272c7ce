"""The compile gate: what production launches on Hopper fits, does not spill, uses matrix units, and is on record."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import triton_shim  # noqa: F401  (before any module with kernels)
from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "kernels" / "benchmarks"))

from gpu_bench import hopper_table  # isort: skip
from gpu_bench.hopper import MAX_SHARED_BYTES, Compiled  # isort: skip
from gpu_bench.production import Case  # isort: skip

GOOD = Compiled(
    kernel="split_kernel", num_warps=8, num_stages=3, constants={}, registers=255, stack_bytes=8, shared_bytes=221_696,
    wgmma={"m64n256k16.bf16": 4}, mma_sync=0, async_copies=36,
)
CASE = Case(op="mla_decode", name="bf16", call=lambda: None, stack_bytes={"split_kernel": 16})


def run_gate(*ops: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: there the kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [ROOT / "kernels" / "benchmarks" / "hopper_table.sh", *(["--without-fp16", "--ops", *ops] if ops else [])],
        env=environment | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )


@pytest.mark.timeout(900)  # 20 s of one core, on an idle machine
def test_attention_and_experts_compile_within_limits_and_as_recorded() -> None:
    """In bf16 and FP8; fp16 and the other ops are slow."""
    done = run_gate("mla_decode", "mla_prefill", "grouped_gemm")
    assert done.returncode == 0, done.stderr
    assert "35 kernels compiled for sm_90, 0 problems" in done.stdout


COMPILED_BEFOREHAND = """
import sys
from pathlib import Path
from gpu_bench import precompile
from gpu_bench.bench_cases import bench_cases
from gpu_bench.hopper import launches
from gpu_bench.shapes import Maker
job = ("verify_drafts", "int32")
assert {(case.op, case.dtype) for case in bench_cases()} <= set(precompile.jobs()) >= {("check", "fp8")}
precompile.compile_job(job)
compiled = sorted(Path(sys.argv[1]).rglob("*.cubin"))
[case] = [case for case in bench_cases() if (case.op, case.dtype) == job]
launches(case.prepare(Maker.on("cpu"))[0])
assert [file.name for file in compiled] == ["verify_kernel.cubin"]
assert sorted(Path(sys.argv[1]).rglob("*.cubin")) == compiled
"""


def test_what_is_compiled_beforehand_is_what_a_launch_with_memory_looks_for(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "PYTHONPATH": ":".join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILED_BEFOREHAND, tmp_path], env=environment, check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_limits_and_as_recorded() -> None:
    done = run_gate()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("change", "complaint"), [
    ({"shared_bytes": MAX_SHARED_BYTES + 1}, "bytes of shared memory"),
    ({"stack_bytes": 17}, "its budget is 16"),
    ({"wgmma": {}}, "should use wgmma"),
    ({"mma_sync": 3}, "should use wgmma"),
])
def test_the_gate_sees_each_limit(change: dict[str, object], complaint: str) -> None:
    assert not hopper_table.check_limits(CASE, GOOD)
    [wrong] = hopper_table.check_limits(CASE, dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]
    assert complaint in wrong


def test_the_gate_sees_a_changed_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    table = json.loads(hopper_table.TABLE.read_text(encoding="utf-8"))
    monkeypatch.setattr(hopper_table.triton, "__version__", table["triton"])
    rows = [row for row in table["rows"] if row["op"] == "mla_decode"]
    assert {row["call"].split()[0] for row in rows} == {"bf16", "fp8", "fp16"}
    assert hopper_table.differences(rows, ["mla_decode"]) == []
    changed = [rows[0] | {"registers": rows[0]["registers"] - 1}, *rows[1:]]
    [wrong] = hopper_table.differences(changed, ["mla_decode"])
    assert "registers" in wrong
    assert hopper_table.differences(rows[1:], ["mla_decode"])


def test_the_table_is_of_the_triton_that_is_tested_with() -> None:
    """With another one the gate compares no figures."""
    table = json.loads(hopper_table.TABLE.read_text(encoding="utf-8"))
    assert f"triton=={table['triton']}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_the_page_shows_the_table() -> None:
    table = json.loads(hopper_table.TABLE.read_text(encoding="utf-8"))
    assert hopper_table.PAGE.read_text(encoding="utf-8") == hopper_table.page(table["rows"], table["triton"])
    assert {row["op"] for row in table["rows"]} == {case.op for case in hopper_table.cases()}
