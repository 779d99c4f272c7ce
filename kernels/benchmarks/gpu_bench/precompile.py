"""Compiles what gpu.sh launches into Triton's cache beforehand, on several cores: the run itself compiles one kernel
at a time, which would take a good part of its minutes. `python -m gpu_bench.precompile`

As for the compile gate, nothing runs on a GPU. What is missed here is compiled when it is launched.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from gpu_bench.bench_cases import bench_cases
from gpu_bench.checks import checks
from gpu_bench.cores import num_cores
from gpu_bench.hopper import launches
from gpu_bench.shapes import V3, Maker
from pd_kernels import triton_ops

WIDE = "V3's widths"  # checks whose inputs take long to make: most of their kernels are those of the timings
MAX_PROCESSES = 16
Job = tuple[str, str]  # an op and a dtype of the timings, or "check" and its name


def start() -> None:
    """In a process of its own, which ends by itself."""
    subprocess.Popen([sys.executable, "-m", "gpu_bench.precompile"], stdout=subprocess.DEVNULL)


def jobs() -> list[Job]:
    """Cases of one op share kernels, and so make one job; the longest ones come first."""
    triton_ops._device_name = str  # no GPU is looked for
    cases = sorted({(case.op, case.dtype) for case in bench_cases(V3)}, key=lambda job: job[0] != "grouped_gemm")
    return cases + [("check", check.name) for check in checks(torch.device("cpu")) if WIDE not in check.name]


def compile_job(job: Job) -> None:
    """Into Triton's cache."""
    triton_ops._device_name = str
    torch.set_num_threads(1)
    op, what = job
    for case in bench_cases(V3):
        if (case.op, case.dtype) == job:
            launches(case.prepare(Maker.on("meta"))[0])
    for check in checks(torch.device("cpu")) if op == "check" else ():
        if check.name == what:  # it fails: what it compares was never computed
            with contextlib.suppress(Exception), contextlib.redirect_stderr(None):
                launches(check.run)


def main() -> None:
    with ProcessPoolExecutor(min(MAX_PROCESSES, num_cores()), mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(compile_job, jobs()):
            pass


if __name__ == "__main__":
    main()
