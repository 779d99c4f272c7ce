"""Three built-in kinds of traffic, drawn from a seed: for who has no trace of their own."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.traced import TracedRequest

BLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Lognormal lengths by median and spread (sigma of the logarithm).

    Attributes:
        shared_tokens: with which all prompts of one of `num_shared` groups begin: a system prompt, or a document that
            several questions are about.
    """

    name: str
    prompt_median: int
    prompt_spread: float
    output_median: int
    output_spread: float
    shared_tokens: int
    num_shared: int


KINDS = {
    kind.name: kind for kind in (
        Kind(name="short", prompt_median=120, prompt_spread=0.6, output_median=150, output_spread=0.7,
             shared_tokens=64, num_shared=1),
        Kind(name="documents", prompt_median=6000, prompt_spread=0.6, output_median=200, output_spread=0.6,
             shared_tokens=4096, num_shared=16),
        Kind(name="reasoning", prompt_median=250, prompt_spread=0.8, output_median=2000, output_spread=0.8,
             shared_tokens=128, num_shared=1),
    )
}


def draw(names: Iterable[str], arrivals: Iterable[float], seed: int) -> list[TracedRequest]:
    """One request for each arrival, its kind drawn from `names`.

    Raises:
        InvalidArgument: there is no such kind.
    """
    chosen = []
    for name in names:
        if name not in KINDS:
            raise InvalidArgument(f"--kind must be {', '.join(KINDS)}, got {name[:40]!r}")
        chosen.append(KINDS[name])
    rng = random.Random(seed)
    return [_one(rng.choice(chosen), at, number, rng) for number, at in enumerate(arrivals)]


def _one(kind: Kind, arrival_s: float, number: int, rng: random.Random) -> TracedRequest:
    prompt = max(1, round(rng.lognormvariate(math.log(kind.prompt_median), kind.prompt_spread)))
    output = max(1, round(rng.lognormvariate(math.log(kind.output_median), kind.output_spread)))
    group = rng.randrange(kind.num_shared)
    num_blocks = -(-prompt // BLOCK)
    shared = min(num_blocks, kind.shared_tokens // BLOCK)
    base = 1 + list(KINDS).index(kind.name)
    ids = [base * 10**12 + group * 10**6 + index for index in range(shared)]
    ids += [base * 10**15 + number * 10**6 + index for index in range(num_blocks - shared)]
    return TracedRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, prefix=tuple(ids),
                         block_tokens=BLOCK, kind=kind.name)
