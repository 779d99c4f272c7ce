"""More at once than a decode pool has room for: sequences move to host memory and back. Pure."""

from __future__ import annotations

import random
from dataclasses import replace

from pd_ops.request_options import TokensPrompt
from pd_ops.verification.cases import Case, CaseLimits, Phase, draw_sampling

NUM_AT_ONCE = 16
DEMAND = 2.0  # tokens that all of them have in the end, as a share of the room
MAX_DEMAND_TOKENS = 12_000  # more takes long: it is all done again in one process
PROMPT_TOKENS = (16, 80)


def pressed_cases(num_room_tokens: int, first_number: int, seed: int, limits: CaseLimits) -> list[Case]:
    """`NUM_AT_ONCE` cases, to run on one pair of workers at once, which together outgrow its decode pool of
    `num_room_tokens`; none if that would take more than `MAX_DEMAND_TOKENS`, or longer answers than a model has."""
    each = -(-int(DEMAND * num_room_tokens) // NUM_AT_ONCE)
    if each * NUM_AT_ONCE > MAX_DEMAND_TOKENS or not PROMPT_TOKENS[1] < each <= limits.max_context_length:
        return []
    rng = random.Random(seed + 3)
    return [_case(first_number + place, each, rng, limits) for place in range(NUM_AT_ONCE)]


def _case(number: int, num_tokens: int, rng: random.Random, limits: CaseLimits) -> Case:
    num_prompt_tokens = rng.randint(*PROMPT_TOKENS)
    sampling = replace(
        draw_sampling(number, rng, limits), max_tokens=num_tokens - num_prompt_tokens, ignore_eos=True, logprobs=0,
    )
    ids = tuple(rng.randrange(limits.vocab_size) for _ in range(num_prompt_tokens))
    return Case(number=number, prompt=TokensPrompt(token_ids=ids), sampling=sampling, phase=Phase.PRESSED)
