"""The same requests in one process: what they ought to give."""

from __future__ import annotations

from pd_ops.monolithic import Monolithic
from pd_ops.verification.outcome import Outcome, logprob_bits
from pd_ops.verification.remote import Request


def expected_outcome(monolithic: Monolithic, request: Request) -> Outcome:
    """The outcome of a request that names its seed."""
    assert request.sampling.seed is not None, "without a seed the two runs would differ"
    question = monolithic.questions.ask(request.prompt, request.sampling, request_id="")
    answer = monolithic.answer(question, checksums=True)
    return Outcome(
        token_ids=answer.token_ids, text=answer.text, finish_reason=answer.finish_reason.value,
        stop_reason=answer.stop_reason, seed=answer.seed,
        logprobs=tuple(
            logprob_bits(token_id, one.logprob, one.top)
            for token_id, one in zip(answer.token_ids, answer.logprobs, strict=bool(answer.logprobs))
        ),
        num_prompt_tokens=answer.usage.prompt_tokens, num_cached_tokens=answer.usage.cached_tokens,
        block_checksums=answer.prompt_checksums, handoff_bytes=None,
    )
