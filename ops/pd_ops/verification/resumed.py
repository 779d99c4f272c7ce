"""Requests that a client begins again with the tokens that it has: from every index of an answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pd_ops.request_options import TokensPrompt
from pd_ops.verification.cases import Case, Phase
from pd_ops.verification.warm import FinishedCase


def resumed_cases(
    cases: Sequence[Case], finished: Sequence[FinishedCase], num_requests: int, first_number: int
) -> list[Case]:
    """For each of `num_requests` finished cases, and every k from 0 to the length of its answer: the same again, after
    k tokens. Without logprobs: with them a router has the tokens generated again.

    Chosen are those with the longest answers, of as many modes as there are.
    """
    by_length = sorted(zip(cases, finished, strict=True), key=lambda pair: -len(pair[1].token_ids))
    firsts: dict[str, tuple[Case, FinishedCase]] = {}
    for pair in by_length:
        firsts.setdefault(pair[0].mode, pair)
    chosen = [*firsts.values(), *[pair for pair in by_length if firsts[pair[0].mode] is not pair]][:num_requests]
    return [
        Case(
            number=first_number + number, prompt=TokensPrompt(token_ids=done.prompt_ids), phase=Phase.RESUMED,
            follows=case.number, sampling=replace(case.sampling, logprobs=None), emitted=done.token_ids[:count],
        )
        for number, (case, done, count) in enumerate(
            (case, done, count) for case, done in chosen for count in range(len(done.token_ids) + 1)
        )
    ]
