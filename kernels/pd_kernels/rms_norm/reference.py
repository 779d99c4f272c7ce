"""RMSNorm (Zhang and Sennrich 2019): y = w · x / sqrt(mean(x²) + eps), fp32 inside, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_kernels.elementary.reference import sum_tree


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm over the last dim, unrounded: float32."""
    x = x.float()
    mean = sum_tree(x * x) / x.shape[-1]
    scale = 1.0 / torch.sqrt(mean + eps)
    return x * scale.unsqueeze(-1) * weight.float()


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """y_TD in the dtype of x."""
    return normalize(x_TD, weight_D, eps).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, x_scale: float = 1.0,
                 residual_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(y_TD, sum_TD): sum = residual_scale · residual + x_scale · x is rounded to the dtype, and the norm sees the
    rounded sum. The scales are those of the FP16 guard (pd_engine.model.fp16_guard)."""
    sum_TD = (residual_TD.float() * residual_scale + x_TD.float() * x_scale).to(x_TD.dtype)
    return rms_norm(sum_TD, weight_D, eps), sum_TD


def concat_norms(a_TD: Tensor, a_weight_D: Tensor, b_TD: Tensor, b_weight_D: Tensor, eps: float) -> Tensor:
    """[rms_norm(a) | rms_norm(b)]: [T, 2·D]."""
    return torch.cat([rms_norm(a_TD, a_weight_D, eps), rms_norm(b_TD, b_weight_D, eps)], dim=-1)
