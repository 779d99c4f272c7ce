"""What gpu.sh runs: correctness, ceilings, a model end to end, NCCL with itself, a whole cluster, timings; in this
order, within a time.

Nothing else is run when a check has failed. What is known is written after each step, so that a run that is cut short
leaves what it has found, and `--resume` goes on from there. Exit status: 0 all well, 1 something failed, 2 there is no
GPU to run on.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
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
from gpu_bench.cluster import run_cluster
from gpu_bench.shapes import V3, Dims, Maker
from gpu_bench.timing import measure, measure_ceilings
from pd_kernels.triton_ops import NoGpu, TritonOps

TINY_DIMS = Dims(D=64, H=2, N=16, R=8, C=128, V=16, Q=32, F=64, X=4, K=2, I=128, num_groups=2, num_groups_kept=1, Z=96)
DEFAULT_SECONDS = 450
Save = Callable[[report.Document], None]


class Clock:
    """How much of the run's time is left."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._end_s - time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS,
                        help="timings that do not fit in are left out; a dry run makes all of them")
    parser.add_argument("--resume", action="store_true",
                        help="keep what gpu.json has of the same commit, GPU and versions; repeat only what failed")
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
    identity = report.identity(device)
    known = report.read(arguments.output, identity) if arguments.resume else None
    document = run(
        device, Clock(math.inf if arguments.dry_run else arguments.seconds), tiny=arguments.dry_run, known=known,
        save=lambda document: report.write(document, arguments.output),
    )
    print(report.markdown(document))
    print(f"written: {arguments.output / 'gpu.json'}, {arguments.output / 'gpu.md'}")
    return 1 if document["failed"] else 0


def run(
    device: torch.device, clock: Clock, *, tiny: bool, known: report.Document | None = None,
    save: Save = lambda document: None,
) -> report.Document:
    """Everything that fits into the time.

    Args:
        known: of an earlier run of the same code on the same GPU: what passed there is not done again.
        save: called with what is known after each step.
    """
    torch.set_num_threads(1 if tiny else max(1, (os.cpu_count() or 2) // 2))
    document = known or report.empty(device, is_dry_run=tiny)
    document |= {"left_out": [], "failed": False}
    _check(device, document, save, tiny=tiny)
    if document["failed"]:
        document["left_out"].append("all timings: a check failed")
        save(document)
        return document
    if not document["ceilings"]:
        document["ceilings"] = dataclasses.asdict(measure_ceilings(device))
    parts: dict[str, Callable[[], dict[str, Any]]] = {"end_to_end": lambda: _end_to_end(device, tiny=tiny)}
    if device.type == "cuda":
        parts |= {"nccl": _nccl, "cluster": run_cluster}
    for name, function in parts.items():
        if document[name] is None or "error" in document[name]:
            document[name] = _part(name, document, function)
            save(document)
    _time_cases(device, clock, document, save, tiny=tiny)
    save(document)
    return document


def _check(device: torch.device, document: report.Document, save: Save, *, tiny: bool) -> None:
    passed = {check["name"] for check in document["checks"] if check["error"] is None}
    document["checks"] = [check for check in document["checks"] if check["error"] is None]
    for check in checks.checks(device, tiny=tiny):
        if check.name not in passed:
            error = _attempt(f"check: {check.name}", check.run)
            document["checks"].append({"name": check.name, "error": error})
            document["failed"] |= error is not None
            save(document)


def _time_cases(device: torch.device, clock: Clock, document: report.Document, save: Save, *, tiny: bool) -> None:
    timed = {(row["op"], row["name"], row["dtype"]) for row in document["timings"]}
    for number, case in enumerate(bench_cases(TINY_DIMS, tiny=True) if tiny else bench_cases(V3)):
        label = f"{case.op}, {case.name}, {case.dtype}"
        if (case.op, case.name, case.dtype) in timed:
            continue
        if clock.left_s() <= 0:
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
        save(document)


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
