"""The compile gate's table: `python -m gpu_bench.hopper_table --check`, or `--write` after a change that is meant.

The table is kept as JSON beside this package and as Markdown in docs/kernels/. Limits hold with any version of Triton;
the figures are compared with those of the version that the table was written with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import triton

from gpu_bench.hopper import MAX_SHARED_BYTES, Compiled, compile_launches
from gpu_bench.production import FP16, MATRIX_KERNELS, Case, cases

FOLDER = Path(__file__).resolve().parents[1]
TABLE = FOLDER / "hopper.json"
PAGE = FOLDER.parents[1] / "docs" / "kernels" / "hopper.md"
Row = dict[str, Any]

INTRODUCTION = """# Kernels compiled for Hopper

Every kernel that serving DeepSeek-V3 on one H100 or H200 launches, as Triton {version} compiles it for sm_90.
Registers and stack are a thread's; stack bytes are spills. A block may have {shared} bytes of shared memory. `wgmma`
are Hopper's matrix instructions in the PTX, with their number.

Written by `kernels/benchmarks/hopper_table.sh --write`; tests compare it.

| op | call | kernel | tile | warps, stages | registers | stack | shared | matrix instructions |
|---|---|---|---|---|---|---|---|---|
"""


def check_limits(case: Case, compiled: Compiled) -> list[str]:
    """What is wrong with one kernel, whatever the table says."""
    where = f"{case.op} {case.name}: {compiled.kernel}"
    wrong = []
    if compiled.shared_bytes > MAX_SHARED_BYTES:
        wrong.append(f"{where} needs {compiled.shared_bytes} bytes of shared memory; a block has {MAX_SHARED_BYTES}")
    budget = case.stack_bytes.get(compiled.kernel, 0)
    if compiled.stack_bytes > budget:
        wrong.append(f"{where} has {compiled.stack_bytes} bytes of stack; its budget is {budget}")
    if compiled.kernel in MATRIX_KERNELS and (not compiled.wgmma or compiled.mma_sync):
        wrong.append(f"{where} should use wgmma only, has {compiled.wgmma} and {compiled.mma_sync} of mma.sync")
    return wrong


def is_wanted(op: str, call: str, ops: list[str], *, with_fp16: bool) -> bool:
    """Whether a call is among those of some ops; among all if none is given."""
    return (not ops or op in ops) and (with_fp16 or not call.startswith(FP16))


def compile_cases(ops: list[str], *, with_fp16: bool = True) -> tuple[list[Row], list[str]]:
    """(rows of the table, what is beyond a limit) for the calls that are wanted."""
    rows, wrong = [], []
    known = {case.op for case in cases()}
    assert set(ops) <= known, f"unknown ops {set(ops) - known}; known are {sorted(known)}"
    for case in cases():
        if is_wanted(case.op, case.name, ops, with_fp16=with_fp16):
            for compiled in _unique(compile_launches(case.call)):
                wrong += check_limits(case, compiled)
                rows.append({"op": case.op, "call": case.name, **dataclasses.asdict(compiled)})
    return rows, wrong


def _unique(launches: list[Compiled]) -> list[Compiled]:
    """Each kernel once: a call may launch one for each half of its work, or for bounded parts."""
    return [compiled for index, compiled in enumerate(launches) if compiled not in launches[:index]]


def differences(rows: list[Row], ops: list[str], *, with_fp16: bool = True) -> list[str]:
    """How the rows differ from the committed table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if table["triton"] != triton.__version__:
        print(f"the table is of Triton {table['triton']}, this is {triton.__version__}: limits only", file=sys.stderr)
        return []
    expected = [row for row in table["rows"] if is_wanted(row["op"], row["call"], ops, with_fp16=with_fp16)]
    if len(expected) != len(rows):
        return [f"{len(rows)} kernels instead of {len(expected)}"]
    return [
        f"{row['op']} {row['call']}: {row['kernel']}: {key} is {row.get(key)}, the table has {want.get(key)}"
        for row, want in zip(rows, expected, strict=True)
        for key in want if row.get(key) != want[key]
    ]


def page(rows: list[Row], version: str) -> str:
    """The table for readers."""
    lines = []
    for row in rows:
        tile = " ".join(
            f"{key.removeprefix('BLOCK_')}={value}" for key, value in row["constants"].items()
            if key.startswith(("BLOCK", "TILE")) and key != "BLOCK_X"
        )
        matrix = ", ".join(f"{name} ({count})" for name, count in row["wgmma"].items()) or "–"
        lines.append(
            f"| {row['op']} | {row['call'] or '–'} | {row['kernel'].removesuffix('_kernel')} | {tile or '–'} "
            f"| {row['num_warps']}, {row['num_stages']} | {row['registers']} | {row['stack_bytes']} "
            f"| {row['shared_bytes']:,} | {matrix} |"
        )
    return INTRODUCTION.format(version=version, shared=f"{MAX_SHARED_BYTES:,}") + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    parser.add_argument("--ops", nargs="*", default=[], help="only these ops; all by default")
    parser.add_argument("--without-fp16", action="store_true", help="only what engines of other dtypes launch")
    arguments = parser.parse_args()
    if arguments.write and (arguments.ops or arguments.without_fp16):
        parser.error("--write takes all ops, in every dtype")
    rows, wrong = compile_cases(arguments.ops, with_fp16=not arguments.without_fp16)
    if arguments.write:
        TABLE.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(rows, triton.__version__), encoding="utf-8")
    else:
        wrong += differences(rows, arguments.ops, with_fp16=not arguments.without_fp16)
    for problem in wrong:
        print(problem, file=sys.stderr)
    print(f"{len(rows)} kernels compiled for sm_90, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
