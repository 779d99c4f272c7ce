"""The roofline table: `python -m gpu_bench.roofline --write`.

For each timed call its FLOPs, bytes, and the least time that an H200 needs for them by its datasheet; beside it what
was measured, from `measured.json` (a committed result of gpu.sh), or "not measured". As a page, and as JSON for
`pd-relay kernels list --roofline`.
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
FIGURES = PAGE.with_suffix(".json")
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


def rows(document: dict[str, Any] | None) -> list[Row]:
    """A line a timed call. `measured_us`, `share` of the floor and `goal_reached`: None where nothing was measured."""
    timings = {(row["op"], row["name"], row["dtype"]): row for row in document["timings"]} if document else {}
    ceilings = document["ceilings"] if document else {}
    result = []
    for case in bench_cases():
        least, bound = floor_us(case)
        timing = timings.get((case.op, case.name, case.dtype))
        median = timing["median_us"] if timing else None
        value = reached(case, median, ceilings) if median and ceilings else None
        result.append({
            "op": case.op, "call": case.name, "dtype": case.dtype, "flops": case.flops, "bytes": case.num_bytes,
            "bound_by": bound, "floor_us": round(least, 4), "measured_us": median,
            "share": least / median if median else None, "goal": goal_text(case), "reached": value,
            "goal_reached": None if value is None else value >= case.goal_value,
        })
    return result


def page(document: dict[str, Any] | None) -> str:
    """The table, with the figures of a result of gpu.sh if there is one."""
    lines = []
    for row in rows(document):
        measured, share = "not measured", "–"
        if row["measured_us"] is not None:
            measured, share = f"{row['measured_us']:.1f}", f"{row['share']:.0%}"
            if row["goal_reached"] is not None:
                share += f" (goal: {'reached' if row['goal_reached'] else 'missed, {:.2f}'.format(row['reached'])})"
        lines.append(
            f"| {row['op']} | {row['call']} | {row['dtype']} | {row['flops'] / 1e9:,.2f} | {row['bytes'] / 1e6:,.1f} "
            f"| {row['bound_by']} | {row['floor_us']:,.1f} | {measured} | {share} | {row['goal']} |"
        )
    return INTRODUCTION.format(source=_source(document)) + "\n".join(lines) + "\n"


def figures(document: dict[str, Any] | None) -> str:
    """The same as JSON."""
    about = document["identity"] if document else None
    return json.dumps({"measured_on": about, "rows": rows(document)}, indent=1) + "\n"


def _source(document: dict[str, Any] | None) -> str:
    if document is None:
        return NOT_MEASURED
    about, ceilings = document["identity"], document["ceilings"]
    code = f"commit {about['commit']}" if about["commit"] else f"sources {about['sources']}"
    parts = [f"Measured {about['date']} on {about['gpu']}, {code}, torch {about['torch']}, Triton {about['triton']}."]
    if ceilings:
        parts[0] = (
            f"{parts[0][:-1]}: a copy moved {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, a product ran at "
            f"{ceilings['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s."
        )
    wrong = [name.removeprefix("check: ") for name in document["errors"] if name.startswith("check: ")]
    if wrong:
        parts.append(f"**Checks failed, so that figures may be of wrong results**: {'; '.join(wrong)}.")
    return "\n\n".join(parts)


def committed() -> dict[str, Any] | None:
    """The committed result of gpu.sh."""
    return json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page instead of comparing with it")
    arguments = parser.parse_args()
    wrong = []
    for file, text in ((PAGE, page(committed())), (FIGURES, figures(committed()))):
        if arguments.write:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif file.read_text(encoding="utf-8") != text:
            wrong.append(file)
            print(f"{file} is not what the cases give; write it with --write", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
