"""Every split of a prompt between what is cached and what is new. Pure: the same seed gives the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from pd_ops.request_options import TokensPrompt
from pd_ops.verification.cases import Case, CaseLimits, Phase, draw_sampling

NUM_BLOCKS = 2
NUM_TAIL_TOKENS = 3
NUM_NEW_TOKENS = 6


def split_cases(num_prompts: int, first_number: int, seed: int, limits: CaseLimits) -> tuple[list[Case], list[Case]]:
    """For every prompt and every k from 1 to its length less one: a case whose prompt is its first k tokens, and one
    with the whole prompt that follows it. Both have a salt that no others have, so the second finds these k tokens.

    Numbered from `first_number`: first all that lead, then all that follow.
    """
    rng = random.Random(seed + 2)
    prompts = [_prompt(rng, limits) for _ in range(num_prompts)]
    leading = [
        _leading(number, whole[:length], seed, rng, limits)
        for number, (whole, length) in enumerate(_splits(prompts), first_number)
    ]
    number = first_number + len(leading)
    following = [
        Case(
            number=number + place, prompt=TokensPrompt(token_ids=whole), phase=Phase.SPLIT, follows=lead.number,
            sampling=replace(draw_sampling(place, rng, limits), max_tokens=NUM_NEW_TOKENS, min_tokens=None),
            cache_salt=lead.cache_salt,
        )
        for place, (lead, (whole, _)) in enumerate(zip(leading, _splits(prompts), strict=True))
    ]
    return leading, following


def _prompt(rng: random.Random, limits: CaseLimits) -> tuple[int, ...]:
    length = min(NUM_BLOCKS * limits.block_size + NUM_TAIL_TOKENS, limits.max_prompt_tokens)
    return tuple(rng.randrange(limits.vocab_size) for _ in range(length))


def _splits(prompts: list[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], int]]:
    for whole in prompts:
        for length in range(1, len(whole)):
            yield whole, length


def _leading(number: int, token_ids: tuple[int, ...], seed: int, rng: random.Random, limits: CaseLimits) -> Case:
    """Of one token, which prefill samples, or of two, for which the blocks are handed over and cached there too."""
    sampling = replace(draw_sampling(number, rng, limits), max_tokens=rng.choice((1, 2)), min_tokens=None)
    return Case(
        number=number, prompt=TokensPrompt(token_ids=token_ids), sampling=sampling, phase=Phase.SPLIT,
        cache_salt=f"verify-{seed}-{number}",
    )
