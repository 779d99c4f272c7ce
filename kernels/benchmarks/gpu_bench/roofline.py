"""The roofline table: `python -m gpu_bench.roofline --write`.

For each timed call its FLOPs, bytes, and the least time that an H200 needs for them by its datasheet; beside it what
was measured, from `measured.json` (a committed result of gpu.sh), or "not measured".
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gpu_bench.bench_cases import BenchCase, Goal, bench_cases

FOLDER = Path(__file__).resolve().parents[1]
MEASURED = FOLDER / "measured.json"
PAGE = FOLDER.parents[1] / "docs" / "kernels" / "roofline.md"
BYTES_PER_S = 4.8e12
FLOPS_PER_S = {"bf16": 990e12, "fp8": 1979e12, "fp32": 67e12}
Row = dict[str, Any]

INTRODUCTION = """# Roofline

The calls that `kernels/benchmarks/gpu.sh` times, at DeepSeek-V3's shapes on one GPU. FLOPs and bytes are the least
that the formula needs: each input read once, each output written once. The floor is the larger of bytes / 4.8 TB/s and
FLOPs / 990 TFLOP/s (bf16; 1,979 FP8; 67 on plain float32 units): an H200 by its datasheet. `measured` is a median,
and its share of the floor; goals are held against what the same run measured: the bandwidth of a device copy, and a
bf16 product of 8192 × 8192 × 8192 by cuBLAS.

{source}

| op | call | dtype | GFLOP | MB | bound by | floor µs | measured µs | share of the floor | goal |
|---|---|---|---|---|---|---|---|---|---|
"""
NOT_MEASURED = (
    "**Not measured**: no GPU has run these kernels yet. They are tested under Triton's interpreter, and compiled for "
    "sm_90 ([hopper.md](hopper.md))."
)


def floor_us(case: BenchCase) -> tuple[float, str]:
    """(least time, what bounds it)."""
    memory, compute = case.num_bytes / BYTES_PER_S, case.flops / FLOPS_PER_S[case.units]
    return 1e6 * max(memory, compute), "memory" if memory >= compute else "compute"


def goal_text(case: BenchCase) -> str:
    if case.goal is Goal.NONE:
        return "–"
    if case.goal is Goal.TFLOPS:
        return f"{case.goal_value:.0f} TFLOP/s"
    return f"{case.goal_value:.0%} of {case.goal.value}"


def reached(case: BenchCase, microseconds: float, ceilings: dict[str, float]) -> float | None:
    """What was reached in the goal's own unit; None without a goal."""
    seconds = microseconds / 1e6
    if case.goal is Goal.COPY:
        return case.num_bytes / seconds / ceilings["copy_bytes_per_s"]
    if case.goal is Goal.MATMUL:
        return case.flops / seconds / ceilings["matmul_flops_per_s"]
    if case.goal is Goal.TFLOPS:
        return case.flops / seconds / 1e12
    return None


def page(document: dict[str, Any] | None) -> str:
    """The table, with the figures of a result of gpu.sh if there is one."""
    timings = {(row["op"], row["name"], row["dtype"]): row for row in document["timings"]} if document else {}
    lines = []
    for case in bench_cases():
        least, bound = floor_us(case)
        row = timings.get((case.op, case.name, case.dtype))
        measured, share = "not measured", "–"
        if row and document:
            value = reached(case, row["median_us"], document["ceilings"])
            measured, share = f"{row['median_us']:.1f}", f"{least / row['median_us']:.0%}"
            if value is not None:
                share += f" (goal: {'reached' if value >= case.goal_value else f'missed, {value:.2f}'})"
        lines.append(
            f"| {case.op} | {case.name} | {case.dtype} | {case.flops / 1e9:,.2f} | {case.num_bytes / 1e6:,.1f} "
            f"| {bound} | {least:,.1f} | {measured} | {share} | {goal_text(case)} |"
        )
    return INTRODUCTION.format(source=_source(document)) + "\n".join(lines) + "\n"


def _source(document: dict[str, Any] | None) -> str:
    if document is None:
        return NOT_MEASURED
    about, ceilings = document["identity"], document["ceilings"]
    return (
        f"Measured {about['date']} on {about['gpu']}, commit {about['commit']}, torch {about['torch']}, Triton "
        f"{about['triton']}: a copy moved {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, a product ran at "
        f"{ceilings['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s."
    )


def committed() -> dict[str, Any] | None:
    """The committed result of gpu.sh."""
    return json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page instead of comparing with it")
    arguments = parser.parse_args()
    text = page(committed())
    if arguments.write:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE} is not what the cases give; write it with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
