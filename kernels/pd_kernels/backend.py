"""Which implementation of the ops a process runs: chosen once, by name, and said."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from pd_kernels.cpu.native import LibraryUnusable, library_directory, usable_isas
from pd_kernels.cpu.ops import CpuOps
from pd_kernels.gpu import missing_triton
from pd_kernels.ops import Ops
from pd_kernels.reference import ReferenceOps

log = logging.getLogger(__name__)

OpsName = Literal["auto", "cpu", "reference", "triton"]
DeviceName = Literal["cpu", "cuda"]
DtypeName = Literal["bf16", "fp16", "fp32"]

NO_FP16 = "the compiled CPU ops compute in bf16 and fp32; 'reference', or 'auto', does in fp16 too"


class OpsUnavailable(RuntimeError):
    """The implementation that was asked for by name cannot run here; the message says why."""


def load_ops(name: OpsName, *, threads: int, device: DeviceName = "cpu", dtype: DtypeName = "bf16") -> Ops:
    """The ops of this process; the choice is logged, and a warning where the reference stands in.

    Args:
        name: "reference" is torch; "cpu" the compiled ops, of the best instruction set that this CPU has; "triton" the
            GPU's; "auto" those on a GPU, else the compiled ones if they are built and have `dtype`, else the reference.
            Compiled ops that are there and cannot be used are refused, not passed over.
        threads: compute threads. Torch is given as many for the reference, and one beside the others.
        dtype: in which weights and activations will be stored. The compiled ops have no fp16.

    Raises:
        OpsUnavailable: what was asked for is not built, damaged, not installed, not of this device, or does not have
            the dtype.
    """
    if device == "cuda" or name == "triton":
        return _load_triton(name, device)
    isas = usable_isas()
    missing = NO_FP16 if dtype == "fp16" else _not_built() if not isas else None
    if name == "reference" or missing is not None:
        if name == "cpu":
            raise OpsUnavailable(missing)
        if name == "auto":
            log.warning("the torch reference serves, many times slower: %s", missing)
        torch.set_num_threads(threads)
        ops: Ops = ReferenceOps()
    else:
        torch.set_num_threads(1)
        try:
            ops = CpuOps(isas[-1], threads=threads)
        except LibraryUnusable as error:
            raise OpsUnavailable(f"{error}; the ops 'reference' do without") from None
    log.info("ops: %s (%s)", ops.name, ops.numerics)
    return ops


def _not_built() -> str:
    return (
        f"the compiled CPU ops are not built for this CPU in {library_directory()}; `python -m pd_kernels.build` "
        "builds them where there is a C++ compiler"
    )


def _load_triton(name: OpsName, device: DeviceName) -> Ops:
    if name not in ("auto", "triton"):
        raise OpsUnavailable(f"the ops {name!r} compute on the CPU; a GPU takes 'triton', or 'auto'")
    problem = missing_triton()
    if problem is not None:
        raise OpsUnavailable(problem)
    from pd_kernels.triton_ops import NoGpu, TritonOps  # only here: it takes a second, and a GB that few hosts have

    torch.set_num_threads(1)
    try:
        ops = TritonOps(torch.device(device))
    except NoGpu as error:
        raise OpsUnavailable(str(error)) from None
    log.info("ops: %s on %s (%s)", ops.name, ops.device, ops.numerics)
    return ops
