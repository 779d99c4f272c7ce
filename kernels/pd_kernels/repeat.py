"""Steps that come again and again with few rows: an implementation may record and repeat them."""

from __future__ import annotations

from torch import Tensor

from pd_kernels.cpu.ops import CpuOps
from pd_kernels.cpu.recording import StepFunction
from pd_kernels.ops import Ops, Rows


def repeat(
    ops: Ops, name: str, function: StepFunction, tensors: tuple[Tensor, ...], rows: Rows, *, variant: int = 0
) -> tuple[Tensor, ...]:
    """function(tensors, rows), bit for bit.

    The compiled ops record the calls of `function` for each number of rows, and then only repeat them.

    Args:
        ops: the ops that `function` calls.
        name: stands for `function`, and for all that it refers to: weights, caches. One name, one function.
        function: made of ops alone, each on whole arguments, on results of ops or on tensors that live as long as
            `ops`. What it does may depend on the number of rows and on `variant`, and on nothing else.
        tensors: contiguous, one row a row of the step.
        variant: the same ops on other rows. Results have as many columns in every one.

    Returns:
        The results: valid until the next call with that name.
    """
    if isinstance(ops, CpuOps):
        return ops.repeat(name, function, tensors, rows, variant)
    return function(tensors, rows)
