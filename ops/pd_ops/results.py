"""The result of a request as commands print it: the documented keys, the same from one process and from a cluster.

    token_ids, text, finish_reason ("stop", "length", "cancelled"), stop_reason, seed,
    logprobs: null, or for each token {"token_id", "logprob", "top": [{"token_id", "logprob"}]}
    usage: {"prompt_tokens", "completion_tokens", "cached_tokens"}
    accepted_tokens, drafted_tokens: of speculation
    handoff: null, or {"prefill_worker", "decode_worker", "bytes", "hidden_bytes", "transport"}
    local_prefill: null, or {"worker"}
    warnings: what was unusual about the request
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pd_engine.contracts import api_pb2
from pd_engine.sequence import FinishReason, TokenLogprobs
from pd_ops.output import Document

if TYPE_CHECKING:
    from pd_engine.generate import Delta, Generation


def complete_document(complete: api_pb2.GenerateComplete) -> Document:
    """Of a router's answer."""
    return {
        "token_ids": list(complete.output_ids),
        "text": complete.text,
        "finish_reason": complete.finish_reason,
        "stop_reason": complete.stop_reason or None,
        "seed": complete.seed,
        "logprobs": logprobs_document(complete.logprobs) if complete.logprobs else None,
        "usage": usage_document(
            prompt_tokens=complete.usage.prompt_tokens, completion_tokens=complete.usage.completion_tokens,
            cached_tokens=complete.usage.cached_tokens,
        ),
        "accepted_tokens": complete.accepted_tokens,
        "drafted_tokens": complete.drafted_tokens,
        "handoff": _handoff_document(complete.handoff) if complete.HasField("handoff") else None,
        "local_prefill": {"worker": complete.local_prefill.worker} if complete.HasField("local_prefill") else None,
        "warnings": list(complete.warnings),
    }


def generation_document(generation: Generation, warnings: Sequence[str]) -> Document:
    """Of one process."""
    return {
        "token_ids": list(generation.token_ids),
        "text": generation.text,
        "finish_reason": generation.finish_reason.value,
        "stop_reason": generation.stop_reason or None,
        "seed": generation.seed,
        "logprobs": _engine_logprobs(generation.token_ids, generation.logprobs) if generation.logprobs else None,
        "usage": usage_document(
            prompt_tokens=generation.usage.prompt_tokens, completion_tokens=generation.usage.completion_tokens,
            cached_tokens=generation.usage.cached_tokens,
        ),
        "accepted_tokens": generation.accepted_tokens,
        "drafted_tokens": generation.drafted_tokens,
        "handoff": None,
        "local_prefill": None,
        "warnings": list(warnings),
    }


def interrupted_document(events: Iterable[Document]) -> Document:
    """What had come of an answer that was interrupted: of the events of its steps."""
    steps = list(events)
    logprobs = [one for step in steps for one in step["logprobs"] or ()]
    return {
        "interrupted": True,
        "token_ids": [token_id for step in steps for token_id in step["token_ids"]],
        "text": "".join(step["text"] for step in steps),
        "finish_reason": FinishReason.CANCELLED.value,
        "logprobs": logprobs or None,
    }


def summary_line(document: Document) -> str:
    """What a person wants to know of a result beside its text."""
    usage = document["usage"]
    line = f"[{document['finish_reason']}; {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
    if usage["cached_tokens"]:
        line += f", {usage['cached_tokens']} cached"
    if document["drafted_tokens"]:
        line += f"; {document['accepted_tokens']} of {document['drafted_tokens']} drafts accepted"
    return f"{line}; seed {document['seed']}]"


def chunk_document(chunk: api_pb2.GenerateStreamChunk) -> Document:
    """One event of a stream."""
    return tokens_event(
        index=chunk.index, token_ids=chunk.token_ids, text=chunk.text,
        logprobs=logprobs_document(chunk.logprobs) if chunk.logprobs else None,
    )


def delta_document(delta: Delta) -> Document:
    """The same, of one process."""
    token_ids = [token.token_id for token in delta.tokens]
    logprobs = [token.logprobs for token in delta.tokens if token.logprobs is not None]
    return tokens_event(
        index=delta.index, token_ids=token_ids, text=delta.text,
        logprobs=_engine_logprobs(token_ids, logprobs) if logprobs else None,
    )


def tokens_event(*, index: int, token_ids: Iterable[int], text: str, logprobs: list[Document] | None) -> Document:
    return {"event": "tokens", "index": index, "token_ids": list(token_ids), "text": text, "logprobs": logprobs}


def usage_document(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Document:
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "cached_tokens": cached_tokens,
    }


def logprobs_document(logprobs: Iterable[api_pb2.TokenLogprobs]) -> list[Document]:
    """float32 values, which JSON's doubles hold exactly."""
    return [
        _token_document(one.token_id, one.logprob, zip(one.top_token_ids, one.top_logprobs, strict=True))
        for one in logprobs
    ]


def _engine_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Document]:
    return [
        _token_document(token_id, one.logprob, one.top)
        for token_id, one in zip(token_ids, logprobs, strict=True)
    ]


def _token_document(token_id: int, logprob: float, top: Iterable[tuple[int, float]]) -> Document:
    return {
        "token_id": token_id, "logprob": logprob,
        "top": [{"token_id": candidate, "logprob": value} for candidate, value in top],
    }


def _handoff_document(handoff: api_pb2.Handoff) -> Document:
    return {
        "prefill_worker": handoff.prefill_worker, "decode_worker": handoff.decode_worker,
        "bytes": handoff.bytes, "hidden_bytes": handoff.hidden_bytes, "transport": handoff.transport,
    }
