"""exp, sigmoid, silu and log by the polynomials of the reference, for use inside kernels.

Bits equal the reference's where the kernel is launched with enable_fp_fusion=False.
"""

import triton
import triton.language as tl

from pd_kernels.elementary import reference

LOG2_E = tl.constexpr(reference.LOG2_E)
LN2_HIGH = tl.constexpr(reference.LN2_HIGH)
LN2_LOW = tl.constexpr(reference.LN2_LOW)
EXP_MIN = tl.constexpr(reference.EXP_MIN)
EXP_MAX = tl.constexpr(reference.EXP_MAX)
E0, E1, E2, E3, E4 = (tl.constexpr(c) for c in reference.EXP_COEFFICIENTS)
L0, L1, L2, L3, L4, L5, L6, L7, L8 = (tl.constexpr(c) for c in reference.LOG_COEFFICIENTS)
TWO_THIRDS_BITS = tl.constexpr(reference.TWO_THIRDS_BITS)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds to the nearest even integer


@triton.jit
def exp(x):
    """e^x of float32, as `reference.exp`."""
    x = tl.where(x < EXP_MIN, EXP_MIN, x)
    x = tl.where(x > EXP_MAX, EXP_MAX, x)
    n = (x * LOG2_E + ROUND) - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = (((E4 * r + E3) * r + E2) * r + E1) * r + E0
    p = (p * (r * r) + r) + 1.0
    exponent = tl.where(n == n, n, 0.0).to(tl.int32)
    return p * ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) of float32."""
    return tl.div_rn(1.0, exp(-x) + 1.0)


@triton.jit
def silu(x):
    """x / (1 + e^-x) of float32."""
    return tl.div_rn(x, exp(-x) + 1.0)


@triton.jit
def log(x):
    """ln x of positive normal float32, as `reference.log`."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - TWO_THIRDS_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    p = (((((((L8 * f + L7) * f + L6) * f + L5) * f + L4) * f + L3) * f + L2) * f + L1) * f + L0
    f2 = f * f
    y = (p * f) * f2 + e * LN2_LOW
    y = y - 0.5 * f2
    return (f + y) + e * LN2_HIGH
