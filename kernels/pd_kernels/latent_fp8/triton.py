"""FP8 slots on a GPU: typed views of the cache, and the conversions for use inside kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.latent_fp8 import reference

GROUP = tl.constexpr(reference.GROUP)
E4M3_MAX = tl.constexpr(reference.E4M3_MAX)
MIN_AMAX = tl.constexpr(reference.MIN_AMAX)
FLOAT32_MAX = tl.constexpr(reference.FLOAT32_MAX)
MANTISSA_MASK = tl.constexpr(reference.MANTISSA_MASK)


def views(cache_GKB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same memory as e4m3, float32 and bf16, each [blocks, slots, numbers of that size in a slot]."""
    assert cache_GKB.dtype == torch.uint8 and cache_GKB.shape[-1] % 4 == 0, (cache_GKB.dtype, cache_GKB.shape)
    return cache_GKB.view(torch.float8_e4m3fn), cache_GKB.view(torch.float32), cache_GKB.view(torch.bfloat16)


@triton.jit
def power_of_two_scale(amax):
    """`reference.power_of_two_scale` of finite amax."""
    ratio = tl.div_rn(tl.maximum(amax, MIN_AMAX), E4M3_MAX)
    bits = ratio.to(tl.int32, bitcast=True) + MANTISSA_MASK
    return ((bits >> 23) << 23).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """|x|; 0 for NaN, the largest finite number for infinities."""
    return tl.where(x == x, tl.minimum(tl.abs(x), FLOAT32_MAX), 0.0)


@triton.jit
def to_e4m3(x):
    """Nearest e4m3, saturating; NaN stays NaN."""
    x = tl.where(x > E4M3_MAX, E4M3_MAX, x)
    return tl.where(x < -E4M3_MAX, -E4M3_MAX, x).to(tl.float8e4nv)
