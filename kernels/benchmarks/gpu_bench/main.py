"""What gpu.sh runs: correctness first, then ceilings, a model end to end, NCCL with itself, timings, a whole cluster;
within a time.

What fails costs the others nothing, nor does what hangs or breaks the GPU for its process (`supervise`). What is known
is written before and after each step, so that a run that is cut short leaves what it has found, and `--resume` goes on
from there. Exit status: 0 all well, 1 something failed, 2 there is no GPU to run on, or
Triton cannot launch anything on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from gpu_bench import checks, precompile, report, stand_ins
from gpu_bench.bench_cases import BenchCase, bench_cases
from gpu_bench.cluster import run_cluster
from gpu_bench.cores import num_cores
from gpu_bench.shapes import V3, Dims, Maker
from gpu_bench.steps import Clock, DeviceLost, Save, Step, take
from gpu_bench.supervise import DEVICE_LOST, supervise
from gpu_bench.timing import measure, measure_ceilings
from pd_kernels.triton_ops import NoGpu, TritonOps

TINY_DIMS = Dims(D=64, H=2, N=16, R=8, C=128, V=16, Q=32, F=64, X=4, K=2, I=128, num_groups=2, num_groups_kept=1, Z=96)
DEFAULT_SECONDS = 450
CHECK_LIMIT_S, PART_LIMIT_S, CASE_LIMIT_S = 150, 120, 60
TIME_FOR_FIGURES = 0.4  # of the whole: no check begins later than that before the end
MIN_CLUSTER_S = 60
MAX_THREADS = 8  # of torch, for what checks compare with


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS,
                        help="what does not fit in is left out; a dry run does everything")
    parser.add_argument("--resume", action="store_true",
                        help="keep what gpu.json has of the same sources, GPU and versions; repeat what failed")
    parser.add_argument("--dry-run", action="store_true",
                        help="tiny shapes under Triton's interpreter, on the CPU: tests this script, measures nothing")
    parser.add_argument("--attempt", choices=["first", "next"], help=argparse.SUPPRESS)  # a process of `supervise`
    arguments = parser.parse_args()
    if arguments.dry_run != triton.knobs.runtime.interpret:
        parser.error("--dry-run and TRITON_INTERPRET=1 go together; gpu.sh sees to it")
    if not arguments.dry_run and arguments.attempt is None:
        return supervise(partial(_start, arguments), Clock(arguments.seconds), arguments.output)
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    try:
        TritonOps(device)
        check_launcher(device)
    except NoGpu as error:
        print(error, file=sys.stderr)
        return 2
    is_next = arguments.attempt == "next"
    if arguments.attempt == "first":
        precompile.start()
    known = report.read_same(arguments.output, report.identity(device)) if arguments.resume or is_next else None
    if known is not None and not is_next:
        known["errors"] = {}
    try:
        document = run(
            device, Clock(math.inf if arguments.dry_run else arguments.seconds), tiny=arguments.dry_run, known=known,
            save=lambda document: report.write(document, arguments.output),
        )
    except DeviceLost as error:
        print(error, file=sys.stderr)
        return DEVICE_LOST
    print(report.markdown(document))
    print(f"written: {arguments.output / 'gpu.json'}, {arguments.output / 'gpu.md'}")
    return 1 if document["failed"] else 0


def check_launcher(device: torch.device) -> None:
    """Triton compiles a C module before its first launch, which takes a compiler and Python's headers. Raises NoGpu."""
    if device.type != "cuda":
        return
    try:
        triton.runtime.driver.active.utils  # noqa: B018  (made when it is looked at)
    except Exception as error:
        raise NoGpu(
            f"Triton cannot launch a kernel here: {type(error).__name__}: {error}\nIt needs a C compiler (gcc or "
            "clang, or what CC names), Python.h (Debian: python3-dev) and a folder to write to (TRITON_CACHE_DIR)"
        ) from error


def _start(arguments: argparse.Namespace, seconds: float, is_next: bool) -> int:
    """A process that does the work, and its exit status."""
    command = [sys.executable, "-m", "gpu_bench", "--attempt", "next" if is_next else "first", "--output",
               os.fspath(arguments.output), "--seconds", f"{seconds:.0f}", *(["--resume"] if arguments.resume else [])]
    return subprocess.run(command, check=False).returncode


def run(
    device: torch.device, clock: Clock, *, tiny: bool, known: report.Document | None = None,
    save: Save = lambda document: None,
) -> report.Document:
    """Everything that fits into the time.

    Args:
        known: of an earlier run of the same code on the same GPU: what it has is not done again, nor what it says has
            failed.
        save: called with what is known, before and after each step.

    Raises:
        DeviceLost: see `take`.
    """
    torch.set_num_threads(1 if tiny else max(1, min(MAX_THREADS, num_cores() // 2)))
    document = known or report.empty(device, is_dry_run=tiny)
    document |= {"left_out": [], "failed": bool(document["errors"])}
    take(_steps(device, document, clock, tiny=tiny), document, clock, save, device)
    save(document)
    return document


def _steps(device: torch.device, document: report.Document, clock: Clock, *, tiny: bool) -> Iterator[Step]:
    part_limit_s = 0 if tiny else PART_LIMIT_S
    for_figures_s = TIME_FOR_FIGURES * clock.left_s() if math.isfinite(clock.left_s()) else 0.0
    for check in checks.checks(device, tiny=tiny):
        yield Step(name=f"check: {check.name}", run=partial(_check, document, check), needed_s=for_figures_s,
                   is_done=partial(document["checks"].__contains__, check.name), limit_s=0 if tiny else CHECK_LIMIT_S)
    yield Step(name="ceilings", run=lambda: document.update(ceilings=dataclasses.asdict(measure_ceilings(device))),
               is_done=lambda: bool(document["ceilings"]), limit_s=part_limit_s)
    yield _part("end_to_end", document, lambda: _end_to_end(device, tiny=tiny), limit_s=part_limit_s)
    if device.type == "cuda":
        yield _part("nccl", document, _nccl, limit_s=part_limit_s)
    for number, case in enumerate(bench_cases(TINY_DIMS, tiny=True) if tiny else bench_cases(V3)):
        yield Step(name=f"{case.op}, {case.name}, {case.dtype}", run=partial(_time, document, case, number, device),
                   is_done=partial(_is_timed, document, case), limit_s=0 if tiny else CASE_LIMIT_S)
    if device.type == "cuda":
        yield _part("cluster", document, lambda: run_cluster(clock.left_s()), needed_s=MIN_CLUSTER_S)


def _part(name: str, document: report.Document, function: Callable[[], dict[str, Any]], *, limit_s: int = 0,
          needed_s: float = 0.0) -> Step:
    return Step(name=name, run=lambda: document.update({name: function()}), limit_s=limit_s, needed_s=needed_s,
                is_done=lambda: document[name] is not None)


def _check(document: report.Document, check: checks.Check) -> None:
    check.run()
    document["checks"].append(check.name)


def _is_timed(document: report.Document, case: BenchCase) -> bool:
    return any((row["op"], row["name"], row["dtype"]) == (case.op, case.name, case.dtype)
               for row in document["timings"])


def _time(document: report.Document, case: BenchCase, number: int, device: torch.device) -> None:
    timing = measure(case.prepare(Maker.on(str(device), seed=number)), device)
    print(f"{case.op}, {case.name}, {case.dtype}: {timing.median_us:.1f} us", flush=True)
    document["timings"].append(
        {"op": case.op, "name": case.name, "dtype": case.dtype, "num_rows": case.num_rows, "flops": case.flops,
         "bytes": case.num_bytes, **dataclasses.asdict(timing)})


def _nccl() -> dict[str, Any]:
    from gpu_bench.nccl_self import send_to_self

    return send_to_self()


def _end_to_end(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    stand_ins.install()
    from gpu_bench.end_to_end import run as run_model

    return run_model(device, tiny=tiny)
