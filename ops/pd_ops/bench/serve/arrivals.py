"""When requests arrive: evenly random, in bursts, or as clients with a rate and a spread of their own."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator


def poisson(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    """Seconds after the beginning, without end."""
    return renewal(rate_per_s, 1.0, rng)


def renewal(rate_per_s: float, variation: float, rng: random.Random, *, family: str = "gamma") -> Iterator[float]:
    """Gaps of mean 1 / rate and coefficient of variation `variation`: 1 is Poisson, more is burstier, 0 is a clock.

    `family`: "gamma" or "weibull".
    """
    shape = weibull_shape(variation) if family == "weibull" and variation > 0 else 0.0
    now = 0.0
    while True:
        if variation <= 0:
            gap = 1 / rate_per_s
        elif shape:
            gap = rng.weibullvariate(1 / (rate_per_s * math.gamma(1 + 1 / shape)), shape)
        else:
            gap = rng.gammavariate(variation**-2, variation**2 / rate_per_s)
        now += gap
        yield now


def weibull_shape(variation: float) -> float:
    """The shape at which a Weibull distribution has this coefficient of variation; by bisection, in [0.1, 50]."""
    low, high = 0.1, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _variation(middle) > variation else (low, middle)
    return (low + high) / 2


def _variation(shape: float) -> float:
    """Of a Weibull distribution; falls as the shape grows."""
    first, second = math.lgamma(1 + 1 / shape), math.lgamma(1 + 2 / shape)
    return math.sqrt(max(0.0, math.exp(second - 2 * first) - 1))
