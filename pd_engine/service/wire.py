"""Engine types as internal messages, and back."""

from __future__ import annotations

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import PdRelayError
from pd_engine.sequence import FinishReason, SampledToken, Sequence


def logprobs_message(token: SampledToken) -> pb.Logprobs | None:
    """None where they were not asked for."""
    if token.logprobs is None:
        return None
    return pb.Logprobs(
        token_id=token.token_id,
        logprob=token.logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in token.logprobs.top],
        top_logprobs=[logprob for _, logprob in token.logprobs.top],
    )


def failure_message(error: PdRelayError, missing_blocks: tuple[int, ...], retryable: bool) -> pb.Failure:
    return pb.Failure(
        code=error.code.value, message=error.message, retryable=retryable, missing_blocks=missing_blocks
    )


def finish_names(sequence: Sequence) -> tuple[str, str]:
    """(finish reason, stop reason) after its last token; both empty while it goes on. The stop reason is the stop
    token's id in decimal."""
    reason = sequence.finish_reason()
    if reason is None:
        return "", ""
    return reason.value, str(sequence.token_ids[-1]) if reason is FinishReason.STOP else ""
