"""What gpu.sh runs: correctness, ceilings, timings, NCCL with itself, a model end to end; in this order, within a time.

Nothing is timed when a check has failed. Exit status: 0 all well, 1 a check failed, 2 there is no GPU to run on.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from gpu_bench import checks, report
from gpu_bench.bench_cases import bench_cases
from gpu_bench.shapes import V3, Dims, Maker
from gpu_bench.timing import measure, measure_ceilings
from pd_kernels.triton_ops import NoGpu, TritonOps

TINY_DIMS = Dims(D=64, H=2, N=16, R=8, C=128, V=16, Q=32, F=64, X=4, K=2, I=128, num_groups=2, num_groups_kept=1, Z=96)
DEFAULT_SECONDS = 450
END_SECONDS = 60  # kept free for NCCL and the model


class Clock:
    """How much of the run's time is left."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._end_s - time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="what does not fit in is left out")
    parser.add_argument("--dry-run", action="store_true",
                        help="tiny shapes under Triton's interpreter, on the CPU: tests this script, measures nothing")
    arguments = parser.parse_args()
    if arguments.dry_run != triton.knobs.runtime.interpret:
        parser.error("--dry-run and TRITON_INTERPRET=1 go together; gpu.sh sees to it")
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    try:
        TritonOps(device)
    except NoGpu as error:
        print(error, file=sys.stderr)
        return 2
    document = run(device, Clock(arguments.seconds), tiny=arguments.dry_run)
    report.write(document, arguments.output)
    print(report.markdown(document))
    print(f"written: {arguments.output / 'gpu.json'}, {arguments.output / 'gpu.md'}")
    return 1 if document["failed"] else 0


def run(device: torch.device, clock: Clock, *, tiny: bool) -> report.Document:
    """Everything that fits into the time."""
    torch.set_num_threads(1 if tiny else max(1, (os.cpu_count() or 2) // 2))
    document: report.Document = {
        "identity": report.identity(device), "dry_run": tiny, "checks": [], "ceilings": {}, "timings": [],
        "nccl": None, "end_to_end": None, "left_out": [], "failed": False,
    }
    for check in checks.checks(device, tiny=tiny):
        error = _attempt(f"check: {check.name}", check.run)
        document["checks"].append({"name": check.name, "error": error})
    if any(check["error"] for check in document["checks"]):
        document["failed"] = True
        document["left_out"].append("all timings: a check failed")
        return document
    document["ceilings"] = dataclasses.asdict(measure_ceilings(device))
    _time_cases(device, clock, document, tiny=tiny)
    if device.type == "cuda":
        document["nccl"] = _part("nccl", document, _nccl)
    document["end_to_end"] = _part("end to end", document, lambda: _end_to_end(device, tiny=tiny))
    return document


def _time_cases(device: torch.device, clock: Clock, document: report.Document, *, tiny: bool) -> None:
    for number, case in enumerate(bench_cases(TINY_DIMS, tiny=True) if tiny else bench_cases(V3)):
        label = f"{case.op}, {case.name}, {case.dtype}"
        if clock.left_s() < END_SECONDS:
            document["left_out"].append(label)
            continue
        try:
            timing = measure(case.prepare(Maker.on(str(device), seed=number)), device)
        except Exception as error:  # noqa: BLE001  (one case must not cost the others their figures)
            traceback.print_exc()
            document["left_out"].append(f"{label}: {type(error).__name__}: {error}")
            document["failed"] = True
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        print(f"{label}: {timing.median_us:.1f} us", flush=True)
        document["timings"].append(
            {"op": case.op, "name": case.name, "dtype": case.dtype, "num_rows": case.num_rows, "flops": case.flops,
             "bytes": case.num_bytes, **dataclasses.asdict(timing)})


def _nccl() -> dict[str, Any]:
    from gpu_bench.nccl_self import send_to_self

    return send_to_self()


def _end_to_end(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    from gpu_bench.end_to_end import run as run_model

    return run_model(device, tiny=tiny)


def _part(name: str, document: report.Document, function: Callable[[], dict[str, Any]]) -> Any:
    """Its result, or why there is none. A package that is not installed leaves a part out; anything else fails it."""
    result: list[dict[str, Any]] = []
    try:
        error = _attempt(name, lambda: result.append(function()))
    except ImportError as missing:
        document["left_out"].append(f"{name}: {missing}")
        return None
    if error:
        document["failed"] = True
        return {"error": error}
    return result[0]


def _attempt(name: str, function: Callable[[], object]) -> str | None:
    """What went wrong; None if nothing did."""
    began_s = time.monotonic()
    try:
        function()
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001  (recorded; the run goes on to report it)
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:500]
    print(f"{name}: passed in {time.monotonic() - began_s:.1f} s", flush=True)
    return None
