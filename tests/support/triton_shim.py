"""Triton's interpreter, made trustworthy for bf16, fp16 and fp8. Import this before any module with kernels.

The interpreter keeps bf16 as uint16 and fp8 as uint8. It then computes `tl.dot` and arithmetic on those integers,
truncates fp32 to bf16, and rounds about one fp8 cast in fifty wrongly: all silently. Here

- casts go through torch (round to nearest even; e4m3 saturates at ±448, as the GPU's conversion does),
- `tl.dot` widens its operands first, which is exact, and sums in fp64, so that the bits of a row do not depend on
  where in a tile it stands (BLAS treats the rows at the edge of a matrix differently),
- arithmetic and comparison of bf16, fp16 or fp8 raises: kernels must widen first, as they should on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

if not isinstance(tl.sum, interpreter.InterpretedFunction):
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; tests/conftest.py sets it")

TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16, tl.float32: torch.float32,
}
NARROW = (tl.bfloat16, tl.float16, tl.float8e4nv, tl.float8e5)
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
E4M3_MAX = 448.0


class NarrowArithmetic(TypeError):
    """A kernel computes in bf16, fp16 or fp8."""


def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Bits of `data` as `source` to bits of the nearest `target`; what `_convert_float` should do."""
    if source not in TORCH_DTYPES or target not in TORCH_DTYPES:
        return _original_convert_float(data, source, target, rounding_mode)
    bits = np.array(data, order="C")  # a copy: it may be a read-only broadcast
    tensor = torch.from_numpy(bits.view(SIGNED[bits.dtype.itemsize])).view(TORCH_DTYPES[source])
    if target == tl.float8e4nv:
        tensor = tensor.float().clamp(-E4M3_MAX, E4M3_MAX)
    result = tensor.to(TORCH_DTYPES[target])
    size = result.element_size()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return result.view(signed).numpy().view(UNSIGNED[size])


def widened(handle: Any) -> Any:
    """The same values in float64."""
    data = handle.data
    if handle.dtype.scalar in NARROW:
        data = convert_float(data, handle.dtype.scalar, tl.float32, None).view(np.float32)
    return data.astype(np.float64)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.matmul(widened(a), widened(b)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def operation(self: Any, *args: Any) -> Any:
        for handle in args:
            if isinstance(handle, interpreter.TensorHandle) and handle.dtype.scalar in NARROW:
                raise NarrowArithmetic(f"arithmetic in {handle.dtype}; widen to float32 first")
        return original(self, *args)

    return operation


_builder = type(interpreter.interpreter_builder)
_original_convert_float = interpreter._convert_float
interpreter._convert_float = convert_float
_builder.create_dot = _dot
_builder.binary_op = _refusing(_builder.binary_op)
_builder.unary_op = _refusing(_builder.unary_op)

assert "triton" in sys.modules and triton.knobs.runtime.interpret
