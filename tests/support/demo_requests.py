"""Requests to workers that serve the demo checkpoint, and the comparison of what came with one process."""

from __future__ import annotations

from typing import Any

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.generate import Generation
from pd_engine.sampling.params import SamplingParams
from pd_engine.text.tokenizer import Tokenizer
from support.player import Copy, sampling_message

TEXT = "An object that holds other objects is called a container, and some containers are sequences. " * 60


def params(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    """Sampled, with logprobs."""
    fields: dict[str, Any] = {
        "temperature": 0.8, "top_p": 0.95, "top_k": -1, "seed": 3, "max_tokens": max_tokens, "ignore_eos": True,
        "logprobs": 2,
    }
    return SamplingParams(**(fields | changes))


def message(tokenizer: Tokenizer, asked: SamplingParams, speculate: int = 1) -> pb.Sampling:
    return sampling_message(asked, tokenizer.eos_token_ids, speculate)


def check_equal(copy: Copy, expected: Generation, *, skip: int = 0) -> None:
    """Ids, ends and logprob bits; `skip` leading tokens were known before."""
    assert copy.failure is None
    assert copy.tokens == dict(enumerate(expected.token_ids[skip:], start=skip))
    assert (copy.finish_reason, copy.stop_reason) == (expected.finish_reason.value, expected.stop_reason)
    received = [copy.logprobs[index] for index in sorted(copy.logprobs)]
    assert received == [(item.logprob, item.top) for item in expected.logprobs[skip:]]
