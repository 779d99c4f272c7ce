"""A latent in FP8: 656 bytes for 512 + 64 numbers, against 1,152 in bf16.

    bytes 0 .. C-1          the compressed part, e4m3, in groups of 128 with a scale each
    then 4 · C/128          the scales, float32
    then 2 · R              the rope key, bf16

A scale is the smallest power of two that brings its group within e4m3's range of ±448. Then e4m3 · scale is a bf16
number exactly: what attention reads is the same on every device, and the only error is e4m3's rounding. (A scale of
amax / 448 uses the range a little further, but a floating-point format gains nothing by that except at its very ends.)
A reader takes any float32 scale, and rounds e4m3 · scale to bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
E4M3_MAX = 448.0
MIN_AMAX = 1e-4
FLOAT32_MAX = 3.4028234663852886e38
MANTISSA_MASK = 0x7FFFFF


def slot_bytes(latent_width: int, rope_width: int) -> int:
    """Bytes a token and layer."""
    assert latent_width % GROUP == 0, latent_width
    return latent_width + 4 * (latent_width // GROUP) + 2 * rope_width


def power_of_two_scale(amax: Tensor) -> Tensor:
    """The smallest power of two s with amax <= 448 · s, at least for an amax of 1e-4; float32."""
    ratio = amax.clamp(MIN_AMAX, FLOAT32_MAX) / E4M3_MAX
    return ((ratio.view(torch.int32) + MANTISSA_MASK) & ~MANTISSA_MASK).view(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3, ties to even, saturating; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def encode(latent_TE: Tensor, latent_width: int) -> Tensor:
    """float32 latents [c | k_rope] as slots: uint8 [T, slot_bytes]."""
    c_TgG = latent_TE[:, :latent_width].float().unflatten(1, (-1, GROUP))
    magnitude = c_TgG.abs().nan_to_num(nan=0.0, posinf=FLOAT32_MAX)
    scale_Tg = power_of_two_scale(magnitude.amax(dim=-1))
    values = to_e4m3(c_TgG / scale_Tg.unsqueeze(-1)).flatten(1)
    rope = latent_TE[:, latent_width:].to(torch.bfloat16).contiguous()
    return torch.cat([values.view(torch.uint8), scale_Tg.view(torch.uint8), rope.view(torch.uint8)], dim=1)


def decode(slots_nB: Tensor, latent_width: int) -> Tensor:
    """Slots as bf16 latents [n, C + R]: what attention reads."""
    num_groups = latent_width // GROUP
    scales_end = latent_width + 4 * num_groups
    c = slots_nB[:, :latent_width].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, GROUP))
    scale = slots_nB[:, latent_width:scales_end].contiguous().view(torch.float32)
    rope = slots_nB[:, scales_end:].contiguous().view(torch.bfloat16)
    return torch.cat([(c * scale.unsqueeze(-1)).flatten(1).to(torch.bfloat16), rope], dim=1)
