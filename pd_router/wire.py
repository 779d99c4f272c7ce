"""Internal messages of what the router holds, and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import SampledToken, TokenLogprobs


def journey_ref(journey_id: str, attempt: int) -> pb.JourneyRef:
    return pb.JourneyRef(journey_id=journey_id, attempt=attempt)


def sampling_message(params: SamplingParams, *, ending_ids: frozenset[int], speculate: int) -> pb.Sampling:
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=sorted(ending_ids),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        speculate=speculate,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
    )


def sampled_tokens(token_ids: Sequence[int], logprobs: Sequence[pb.Logprobs]) -> list[SampledToken]:
    """`logprobs` has one entry a token, or none; all have been checked."""
    if not logprobs:
        return list(map(_plain_token, token_ids))
    return [
        SampledToken(token_id=token_id, logprobs=_token_logprobs(entry))
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


@functools.cache  # there are as many as the vocabulary has ids
def _plain_token(token_id: int) -> SampledToken:
    return SampledToken(token_id=token_id)


def _token_logprobs(entry: pb.Logprobs) -> TokenLogprobs:
    return TokenLogprobs(logprob=entry.logprob, top=tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
