"""Activations in e4m3 with one scale a token and 128 consecutive channels (DeepSeek-V3 report, section 3.3.2).

    a = max(amax |x|, 1e-4),  s = a / 448,  q = e4m3(x / s)          s rounded up to a power of two where asked for
                                                                      (`scale_fmt: ue8m0` of DeepSeek-V3.1)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pd_kernels.latent_fp8.reference import E4M3_MAX, FLOAT32_MAX, GROUP, MIN_AMAX, power_of_two_scale, to_e4m3


def fp8_quant(x_TK: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(q_TK e4m3, scale_Tg float32, g the groups of 128 channels, the last one possibly shorter)."""
    num_in = x_TK.shape[1]
    x_TgG = pad(x_TK.float(), (0, -num_in % GROUP)).unflatten(1, (-1, GROUP))
    amax_Tg = x_TgG.abs().nan_to_num(nan=0.0, posinf=FLOAT32_MAX).amax(dim=-1).clamp(min=MIN_AMAX)
    scale_Tg = power_of_two_scale(amax_Tg) if power_of_two else amax_Tg / E4M3_MAX
    return to_e4m3(x_TgG / scale_Tg.unsqueeze(-1)).flatten(1)[:, :num_in].contiguous(), scale_Tg


def dequantize_activations(q_TK: Tensor, scale_Tg: Tensor) -> Tensor:
    """q · s, float32."""
    return q_TK.float() * scale_Tg.repeat_interleave(GROUP, dim=1)[:, : q_TK.shape[1]]


def dequantize_weight(weight_MK: Tensor, scale_mk: Tensor) -> Tensor:
    """W = W_fp8 · scale of its 128 × 128 block, float32; `weight_scale_inv` of the checkpoints is that scale."""
    wide = scale_mk.repeat_interleave(GROUP, dim=0).repeat_interleave(GROUP, dim=1)
    return weight_MK.float() * wide[: weight_MK.shape[0], : weight_MK.shape[1]]


def quantize_weight(weight_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(W_fp8, scale): as a checkpoint stores a weight; for tests and random models."""
    rows, columns = weight_MK.shape
    padded = pad(weight_MK.float(), (0, -columns % GROUP, 0, -rows % GROUP))
    blocks = padded.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=MIN_AMAX) / E4M3_MAX
    quantized = to_e4m3(blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return quantized[:rows, :columns].contiguous(), scale.to(torch.float32)
