"""Replies of OpenAI's completions and chat completions, whole and in chunks, as JSON objects."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pd_engine.sequence import SampledToken
from pd_engine.text.tokenizer import Tokenizer
from pd_router.dispatch import Result
from pd_router.request import Request
from pd_router.stream import Chunk

MIN_LOGPROB = -9999.0  # JSON has no -infinity

Json = dict[str, Any]


class ReplyFormat(ABC):
    """Writes the replies of one request."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, request: Request, tokenizer: Tokenizer, *, model: str, with_token_ids: bool) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._with_token_ids = with_token_ids
        self._head = {"id": self.id_prefix + request.request_id, "created": int(time.time()), "model": model}
        self._num_chars = 0

    @abstractmethod
    def opening(self) -> list[Json]:
        """Chunks before the first token."""

    @abstractmethod
    def _whole_choice(self, result: Result) -> Json: ...

    @abstractmethod
    def _chunk_choice(self, chunk: Chunk) -> Json: ...

    @abstractmethod
    def _final_choice(self) -> Json: ...

    def whole(self, result: Result) -> Json:
        choice = {**self._whole_choice(result), "index": 0, **_reasons(result)}
        if self._with_token_ids:
            choice |= self._token_ids(0, result.tokens)
        return {**self._head, "object": self.whole_object, "choices": [choice], "usage": usage(result)}

    def chunk(self, chunk: Chunk) -> Json | None:
        """None if it has nothing to show yet: its text is held back."""
        if not (chunk.text or self._with_token_ids or self._request.params.logprobs is not None):
            return None
        choice = {**self._chunk_choice(chunk), "index": 0, "finish_reason": None}
        if self._with_token_ids:
            choice |= self._token_ids(chunk.index, chunk.tokens)
        return self._chunk([choice])

    def closing(self, result: Result, *, include_usage: bool) -> list[Json]:
        """Chunks after the last token."""
        final = self._chunk([{**self._final_choice(), "index": 0, **_reasons(result)}])
        return [final, {**self._chunk([]), "usage": usage(result)}] if include_usage else [final]

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _token_ids(self, index: int, tokens: Sequence[SampledToken]) -> Json:
        ids: Json = {"token_ids": [token.token_id for token in tokens]}
        return ids | {"prompt_token_ids": list(self._request.prompt_ids)} if index == 0 else ids

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])


class CompletionFormat(ReplyFormat):
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self) -> list[Json]:
        return []

    def _whole_choice(self, result: Result) -> Json:
        return {"text": result.text, "logprobs": self._logprobs(result.tokens)}

    def _chunk_choice(self, chunk: Chunk) -> Json:
        return {"text": chunk.text, "logprobs": self._logprobs(chunk.tokens)}

    def _final_choice(self) -> Json:
        return {"text": "", "logprobs": None}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if self._request.params.logprobs is None:
            return None
        texts = [self._token_text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._num_chars)
            self._num_chars += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprobs.logprob) for token in tokens if token.logprobs],
            "top_logprobs": [self._top(token) for token in tokens if token.logprobs],
            "text_offset": offsets,
        }

    def _top(self, token: SampledToken) -> dict[str, float]:
        """The most likely tokens and the sampled one; of several with one text, the most likely."""
        assert token.logprobs is not None
        entries = [*token.logprobs.top, (token.token_id, token.logprobs.logprob)]
        best: dict[str, float] = {}
        for token_id, logprob in entries:
            best.setdefault(self._token_text(token_id), _finite(logprob))
        return best


class ChatFormat(ReplyFormat):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[Json]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([choice])]

    def _whole_choice(self, result: Result) -> Json:
        message = {"role": "assistant", "content": result.text}
        return {"message": message, "logprobs": self._logprobs(result.tokens)}

    def _chunk_choice(self, chunk: Chunk) -> Json:
        return {"delta": {"content": chunk.text}, "logprobs": self._logprobs(chunk.tokens)}

    def _final_choice(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if self._request.params.logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._entry(token.token_id, token.logprobs.logprob),
                    "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.logprobs.top],
                }
                for token in tokens
                if token.logprobs is not None
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self._token_text(token_id), "logprob": _finite(logprob), "bytes": list(data)}


def usage(result: Result) -> Json:
    num_prompt, num_completion = len(result.request.prompt_ids), len(result.tokens)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": result.num_cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": result.num_accepted,
            "rejected_prediction_tokens": result.num_drafted - result.num_accepted,
        },
    }


def _reasons(result: Result) -> Json:
    return {"finish_reason": result.finish_reason.value, "stop_reason": result.stop_reason or None}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
