"""RMSNorm on a GPU: one program a row, so that a row's sum has one order whatever the number of rows."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normalize(x, weight_ptr, column, mask, width, eps):
    """w · x / sqrt(mean(x²) + eps) of one row in float32, unrounded. `x` is zero where masked."""
    mean = tl.div_rn(tl.sum(x * x, 0), width.to(tl.float32))
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    return x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * weight


@triton.jit
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, width, x_stride, residual_stride, out_stride,
                    eps, x_scale, residual_scale, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One row. With ADD the residual is added first, both scaled, and the norm sees the rounded sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        total = (residual * residual_scale + x * x_scale).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + column, total, mask=mask)
        x = total.to(tl.float32)
    y = normalize(x, weight_ptr, column, mask, width, eps)
    tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """y_TD in the dtype of x."""
    out_TD = x_TD.new_empty(x_TD.shape)
    _launch(x_TD, None, weight_D, out_TD, None, eps)
    return out_TD


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, x_scale: float = 1.0,
                 residual_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(y_TD, sum_TD): sum = residual_scale · residual + x_scale · x is rounded to the dtype, and the norm sees it."""
    out_TD, sum_TD = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    _launch(x_TD, residual_TD, weight_D, out_TD, sum_TD, eps, x_scale, residual_scale)
    return out_TD, sum_TD


def concat_norms(a_TD: Tensor, a_weight_D: Tensor, b_TD: Tensor, b_weight_D: Tensor, eps: float) -> Tensor:
    """[rms_norm(a) | rms_norm(b)]: [T, 2·D]."""
    num_rows, width = a_TD.shape
    out_T2D = a_TD.new_empty(num_rows, 2 * width)
    _launch(a_TD, None, a_weight_D, out_T2D[:, :width], None, eps)
    _launch(b_TD, None, b_weight_D, out_T2D[:, width:], None, eps)
    return out_T2D


def _launch(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, out: Tensor, sum_TD: Tensor | None,
            eps: float, x_scale: float = 1.0, residual_scale: float = 1.0) -> None:
    num_rows, width = x_TD.shape
    assert x_TD.stride(1) == 1 and (residual_TD is None or residual_TD.stride(1) == 1), x_TD.stride()
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(num_rows,)](
        x_TD, residual_TD, weight_D, out, sum_TD, width, x_TD.stride(0),
        0 if residual_TD is None else residual_TD.stride(0), out.stride(0), eps, x_scale, residual_scale,
        ADD=residual_TD is not None, BLOCK=block, num_warps=max(1, min(8, block // 1024)), enable_fp_fusion=False,
    )
