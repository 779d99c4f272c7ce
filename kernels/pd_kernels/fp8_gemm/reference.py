"""Block-scaled FP8 linear (DeepSeek-V3 report, section 3.3): activations 1 × 128, weights 128 × 128.

    Y = Σ over blocks of 128 channels, in order, of (q_x · q_w^T) · s_x[row, block] · s_w[column / 128, block]

Products of e4m3 are exact in float32; the sum within a block is the matrix units', and blocks are added in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from pd_kernels.elementary.reference import silu
from pd_kernels.fp8_quant.reference import dequantize_activations, dequantize_weight, fp8_quant


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Weight:
    """As a checkpoint stores it: weight_MK e4m3 and scale_mk float32, one a block of 128 × 128, the last ones ragged.

    A leading dim X of both stands for experts.
    """

    weight_MK: Tensor
    scale_mk: Tensor
    power_of_two: bool  # of the activations' scales: the checkpoint's `scale_fmt: ue8m0`


def fp8_linear(x_TK: Tensor, weight: Fp8Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T with x rounded to e4m3 first: in `out_dtype`, the dtype of x by default."""
    x = dequantize_activations(*fp8_quant(x_TK, weight.power_of_two))
    return linear(x, dequantize_weight(weight.weight_MK, weight.scale_mk)).to(out_dtype or x_TK.dtype)


def fp8_expert(x_TD: Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> Tensor:
    """down(silu(gate x) · up x), float32 [T, D]; the product is rounded to the dtype of x, and then to e4m3."""
    gate, up = fp8_linear(x_TD, gate_up, torch.float32).chunk(2, dim=-1)
    return fp8_linear((silu(gate.contiguous()) * up).to(x_TD.dtype), down, torch.float32)
