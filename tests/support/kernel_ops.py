"""The implementations of the ops that this machine can run."""

from __future__ import annotations

import functools

import torch

from pd_kernels.cpu.native import usable_isas
from pd_kernels.cpu.ops import CpuOps
from pd_kernels.ops import Ops
from pd_kernels.reference import ReferenceOps

torch.set_num_threads(1)


def compiled_names() -> list[str]:
    """Every instruction set that is built and that this CPU has, the plain one included."""
    return [f"cpu-{isa}" for isa in usable_isas()]


def names() -> list[str]:
    return ["reference", *compiled_names()]


@functools.cache
def load(name: str) -> Ops:
    return ReferenceOps() if name == "reference" else CpuOps(name.removeprefix("cpu-"), threads=1)
