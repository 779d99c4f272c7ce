"""Block-scaled FP8 linear on a GPU; the kernel is that of linear, whose step over 128 channels knows scales."""

import torch
from torch import Tensor

from pd_kernels.fp8_gemm.reference import Fp8Weight
from pd_kernels.fp8_quant.triton import fp8_quant
from pd_kernels.linear import triton as linear


def fp8_linear(x_TK: Tensor, weight: Fp8Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T with x rounded to e4m3 first: in `out_dtype`, the dtype of x by default."""
    q_TK, scale_Tg = fp8_quant(x_TK.contiguous(), weight.power_of_two)
    y_TM = x_TK.new_empty(x_TK.shape[0], weight.weight_MK.shape[0], dtype=out_dtype or x_TK.dtype)
    linear.matmul(q_TK.unsqueeze(1), weight.weight_MK.unsqueeze(0), y_TM.unsqueeze(1), scale_Tg, weight.scale_mk)
    return y_TM
