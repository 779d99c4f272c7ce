"""The Triton ops under the interpreter, and comparison with the reference through the tolerance table."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from pd_kernels.reference import ReferenceOps
from pd_kernels.tolerances import check_close
from support import triton_shim  # noqa: F401  (before any module with kernels)

from pd_kernels.triton_ops import TritonOps  # isort: skip

TABLE_NAMES = {
    "head": "linear", "moe_experts_unshared": "moe_experts", "mla_attention": "mla_attention_on_matrix_units",
    "mla_attention_expanded": "mla_attention_expanded_on_matrix_units", "linear_fp8": "linear",
    "moe_experts_fp8": "moe_experts", "swiglu_fp8": "swiglu",
}


# The interpreter is slow: float32, in which nobody serves, and float16, of which there are shorter tests, are for
# `make gate`.
dtypes = pytest.mark.parametrize("dtype", [
    pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16", marks=pytest.mark.slow),
])


@functools.cache
def triton_ops() -> TritonOps:
    torch.set_num_threads(1)
    return TritonOps(torch.device("cpu"))


@functools.cache
def reference_ops() -> ReferenceOps:
    torch.set_num_threads(1)
    return ReferenceOps()


def check_op(op: str, dtype: torch.dtype, result: Tensor, expected: Tensor) -> None:
    """Equal where the result is an index, else within the table; non-finite positions first."""
    if result.dtype is torch.int32:
        assert torch.equal(result, expected), (op, result, expected)
    else:
        check_close(TABLE_NAMES.get(op, op), torch.float32 if op in ("head", "logprobs") else dtype, result, expected)
