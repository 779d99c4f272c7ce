"""Rotary embedding (Su et al. 2021) of interleaved pairs, DeepSeek's layout: pair i is (x[2i], x[2i+1])."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_TsR: Tensor, rope_P2R: Tensor, positions_T: Tensor) -> Tensor:
    """Each pair of the last dim turned by its position's angle: float32, unrounded, same shape and layout as x.

    Args:
        x_TsR: [T, R] or [T, H, R].
        rope_P2R: [P, 2, R/2] float32, cosines then sines.
        positions_T: int32.
    """
    table = rope_P2R[positions_T.long()]
    cos, sin = table[:, 0], table[:, 1]
    if x_TsR.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x = x_TsR.float()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
