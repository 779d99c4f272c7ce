"""Replies of OpenAI's completions and chat completions, whole and in chunks, as JSON objects."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pd_engine.sequence import SampledToken
from pd_engine.text.tokenizer import Tokenizer
from pd_router.request import Request, Submission
from pd_router.running import Result
from pd_router.stream import Chunk

MIN_LOGPROB = -9999.0  # JSON has no -infinity

Json = dict[str, Any]


class ReplyFormat(ABC):
    """Writes the replies of one request.

    Args:
        include_usage: every chunk has `usage`, null but in the last one.
        continuous_usage: and not null in the others, but what it is so far.
    """

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, submission: Submission, tokenizer: Tokenizer, *, model: str, with_token_ids: bool, include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._submission = submission
        self._tokenizer = tokenizer
        self._with_token_ids = with_token_ids
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._head = {"id": self.id_prefix + submission.request_id, "created": int(time.time()), "model": model}
        self._num_tokens = [0] * len(submission.choices)  # of each choice, seen here
        self._num_chars = [0] * len(submission.choices)  # ... and of these, each by itself

    @abstractmethod
    def _opening_choice(self) -> Json | None:
        """What a choice's stream begins with."""

    def _skip(self, request: Request, tokens: Sequence[SampledToken]) -> None:
        """Tokens that this client has already."""
        self._num_chars[request.choice] += sum(len(self._token_text(token.token_id)) for token in tokens)

    @abstractmethod
    def _whole_choice(self, result: Result) -> Json: ...

    @abstractmethod
    def _chunk_choice(self, request: Request, chunk: Chunk) -> Json: ...

    @abstractmethod
    def _final_choice(self) -> Json: ...

    def whole(self, results: Sequence[Result]) -> Json:
        choices = []
        for result in results:
            choice = {**self._whole_choice(result), "index": result.request.choice, **_reasons(result)}
            if self._with_token_ids:
                choice |= _token_ids(result.request, 0, result.tokens)
            choices.append(choice)
        usage = usage_of(self._submission, results)
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def opening(self) -> list[Json]:
        """Chunks before the first token."""
        choice = self._opening_choice()
        if choice is None:
            return []
        return [self._chunk([{"index": index, **choice}]) for index in range(len(self._submission.choices))]

    def chunk(self, index: int, chunk: Chunk, tokens: Sequence[SampledToken]) -> Json | None:
        """None if it has nothing to show yet: its text is held back.

        Args:
            tokens: all of the choice so far; the chunk may be the first that this client gets, and not from index 0.
        """
        request = self._submission.choices[index]
        self._skip(request, tokens[self._num_tokens[index] : chunk.index])
        self._num_tokens[index] = chunk.index + len(chunk.tokens)
        if not (chunk.text or self._with_token_ids or request.params.logprobs is not None):
            return None
        choice = {**self._chunk_choice(request, chunk), "index": index, "finish_reason": None}
        if self._with_token_ids:
            choice |= _token_ids(request, chunk.index, chunk.tokens)
        return self._chunk([choice])

    def final(self, result: Result) -> Json:
        """A choice's last chunk."""
        return self._chunk([{**self._final_choice(), "index": result.request.choice, **_reasons(result)}])

    def closing(self, results: Sequence[Result]) -> list[Json]:
        """Chunks after the last choice's last one."""
        return [{**self._chunk([]), "usage": usage_of(self._submission, results)}] if self._include_usage else []

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if not self._include_usage:
            return chunk
        usage = counts_of(self._submission, sum(self._num_tokens)) if self._continuous_usage else None
        return {**chunk, "usage": usage}

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])


class CompletionFormat(ReplyFormat):
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _opening_choice(self) -> Json | None:
        return None

    def _whole_choice(self, result: Result) -> Json:
        return {"text": result.text, "logprobs": self._logprobs(result.request, result.tokens)}

    def _chunk_choice(self, request: Request, chunk: Chunk) -> Json:
        return {"text": chunk.text, "logprobs": self._logprobs(request, chunk.tokens)}

    def _final_choice(self) -> Json:
        return {"text": "", "logprobs": None}

    def _logprobs(self, request: Request, tokens: Sequence[SampledToken]) -> Json | None:
        if request.params.logprobs is None:
            return None
        texts = [self._token_text(token.token_id) for token in tokens]
        *offsets, self._num_chars[request.choice] = itertools.accumulate(
            map(len, texts), initial=self._num_chars[request.choice]
        )
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

    def _opening_choice(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def _whole_choice(self, result: Result) -> Json:
        message = {"role": "assistant", "content": result.text}
        return {"message": message, "logprobs": self._logprobs(result.request, result.tokens)}

    def _chunk_choice(self, request: Request, chunk: Chunk) -> Json:
        return {"delta": {"content": chunk.text}, "logprobs": self._logprobs(request, chunk.tokens)}

    def _final_choice(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, request: Request, tokens: Sequence[SampledToken]) -> Json | None:
        if request.params.logprobs is None:
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


def counts_of(submission: Submission, num_completion: int) -> Json:
    """Of all choices together; a prompt counts once."""
    num_prompt = sum(len(submission.choices[first].prompt_ids) for first in submission.firsts)
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": num_prompt + num_completion,
    }


def usage_of(submission: Submission, results: Sequence[Result]) -> Json:
    """With what was cached of a prompt for each of its choices."""
    num_each = len(results) // submission.num_prompts
    cached = (min(result.num_cached_tokens for result in results[i : i + num_each]) for i in submission.firsts)
    num_accepted = sum(result.num_accepted for result in results)
    return {
        **counts_of(submission, sum(len(result.tokens) for result in results)),
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": sum(result.num_drafted for result in results) - num_accepted,
        },
    }


def _token_ids(request: Request, index: int, tokens: Sequence[SampledToken]) -> Json:
    ids: Json = {"token_ids": [token.token_id for token in tokens]}
    return ids | {"prompt_token_ids": list(request.prompt_ids)} if index == 0 else ids


def _reasons(result: Result) -> Json:
    return {"finish_reason": result.finish_reason.value, "stop_reason": result.stop_reason or None}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
