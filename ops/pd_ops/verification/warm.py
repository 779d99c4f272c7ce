"""Requests that find something in the caches: they begin like one that has run. Pure: the same seed gives the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pd_engine.text.defaults import SamplingFields
from pd_ops.request_options import TokensPrompt
from pd_ops.verification.cases import Case, CaseLimits, Phase, draw_sampling

MAX_FRESH_TOKENS = 40
OFFSETS = (-1, 0, 1)  # from an edge of a block


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedCase:
    """A case that has left its blocks where it ran: those of its prompt, and of its answer at the decode worker."""

    number: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def warm_cases(finished: Sequence[FinishedCase], count: int, seed: int, limits: CaseLimits) -> list[Case]:
    """`count` cases, numbered after the finished ones, in turn:

    - one that goes on: the prompt and the first k tokens of its answer, k from 0 to all of them, as a next turn or a
      request that is begun again after k tokens, with something new behind or nothing;
    - one that parts from an earlier one within a token of a block's edge.
    """
    rng = random.Random(seed + 1)
    return [_warm_case(len(finished) + index, index, finished, rng, limits) for index in range(count)]


def _warm_case(
    number: int, index: int, finished: Sequence[FinishedCase], rng: random.Random, limits: CaseLimits
) -> Case:
    base = finished[-1 - index % len(finished)]  # the last first: what they have left is still cached
    whole = base.prompt_ids + base.token_ids
    fresh = tuple(rng.randrange(limits.vocab_size) for _ in range(rng.randint(0, MAX_FRESH_TOKENS)))
    if index % 2 == 0:
        shared = len(base.prompt_ids) + rng.randint(0, len(base.token_ids))
    else:
        edge = rng.randint(0, len(whole) // limits.block_size) * limits.block_size
        shared = min(len(whole), max(0, edge + OFFSETS[index // 2 % len(OFFSETS)]))
    prompt_ids = (whole[:shared] + fresh or whole[:1])[: limits.longest_prompt_tokens]
    sampling: SamplingFields = draw_sampling(number, rng, limits)
    return Case(
        number=number, prompt=TokensPrompt(token_ids=prompt_ids), sampling=sampling, phase=Phase.WARM,
        follows=base.number,
    )
