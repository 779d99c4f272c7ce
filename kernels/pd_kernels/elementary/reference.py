"""exp and log as fp32 polynomials, and sums in a stated order.

Library functions give other bits in the tail of a vector than in its body, and differ between builds. Here every
step is one IEEE operation (multiplications and additions are rounded apart, never fused), so that a result depends
on its argument alone. Coefficients: interpolation at Chebyshev nodes of the remainder of the Taylor series.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

F32 = np.float32

LOG2_E = 1.44269504
LN2_HIGH = 0.693359375  # ln 2 = high + low; n · high is exact for |n| < 2^15
LN2_LOW = -2.12194440e-4
EXP_MIN, EXP_MAX = -87.0, 88.0
EXP_COEFFICIENTS = (0.5, 0.16666576266288757, 0.04166655242443085, 0.00836323294788599, 0.0013926250394433737)
LOG_COEFFICIENTS = (
    0.3333333432674408, -0.24999944865703583, 0.19999948143959045, -0.16673316061496735, 0.1429186761379242,
    -0.12288721650838852, 0.1091565489768982, -0.12422200292348862, 0.11330617219209671,
)
TWO_THIRDS_BITS = 0x3F2AAAAB


def exp(x: Tensor) -> Tensor:
    """e^x for float32 x of any shape, relative error below 1e-7. Arguments are clamped to [-87, 88]; NaN stays NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2;  e^r = (r² P(r) + r) + 1.
    """
    x = x.clamp(EXP_MIN, EXP_MAX)
    n = (x * LOG2_E).round_()
    r = x.sub_(n * LN2_HIGH)
    r.sub_(n * LN2_LOW)
    p = torch.full_like(r, EXP_COEFFICIENTS[-1])
    for coefficient in EXP_COEFFICIENTS[-2::-1]:
        p.mul_(r).add_(coefficient)
    p.mul_(r * r).add_(r).add_(1.0)
    two_to_n = n.nan_to_num_(0.0).to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return p.mul_(two_to_n)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) for float32 x."""
    return exp(-x).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x) for float32 x."""
    return x / exp(-x).add_(1.0)


def log(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """ln x for positive normal float32 x, relative error below 1e-7 away from 1 and 2 ulp near it.

    x = 2^e (1 + f) with f in [-1/3, 1/3];  ln x = (f + (f³ P(f) + e·low - f²/2)) + e·high.
    """
    bits = x.view(np.int32)
    exponent = (bits - np.int32(TWO_THIRDS_BITS)) >> 23
    f = (bits - (exponent << 23)).view(F32) - F32(1)
    e = exponent.astype(F32)
    p = np.full_like(f, LOG_COEFFICIENTS[-1])
    for coefficient in LOG_COEFFICIENTS[-2::-1]:
        p = p * f + F32(coefficient)
    f2 = f * f
    y = (p * f) * f2 + e * F32(LN2_LOW)
    y = y - F32(0.5) * f2
    return np.asarray((f + y) + e * F32(LN2_HIGH), dtype=F32)


def sum_tree(x: Tensor) -> Tensor:
    """Sum over the last dim: padded with zeros to a power of two, then the upper half is added to the lower, and
    so on."""
    width = x.shape[-1]
    padded = 1 << (width - 1).bit_length()
    if padded != width:
        x = pad(x, (0, padded - width))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
