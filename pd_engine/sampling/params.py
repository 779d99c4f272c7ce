"""Sampling parameters of one request, validated once at the door."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pd_engine.errors import InvalidArgument

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_SPECULATE = 8
NO_TOP_K = -1
MAX_TOP_K = 2**31 - 1  # as it travels


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What the sampler needs. Greedy is `temperature == 0`.

    `temperature` and `top_p` are rounded to float32, which is what travels to a worker: one process computes with the
    same numbers.

    Attributes:
        temperature: >= 0.
        top_p: in (0, 1].
        top_k: in [1, `MAX_TOP_K`], or `NO_TOP_K`.
        seed: unsigned 64-bit; all randomness of the request comes from it (architecture: sampling keyed by position).
        max_tokens: >= 1, tokens to generate at most.
        stop: stop strings; matched on the text, cut before the match.
        stop_token_ids: end the request, beside the checkpoint's eos ids; the stop token itself is emitted.
        ignore_eos: do not stop at the checkpoint's eos ids.
        logprobs: None, or how many most likely tokens to report beside the sampled one.
        speculate: draft tokens a step; None means the server's setting.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculate: int | None = None

    def __post_init__(self) -> None:
        """Raises:
        InvalidArgument: a value is outside its range; the message names the field and the range.
        """
        object.__setattr__(self, "temperature", ctypes.c_float(self.temperature).value)
        object.__setattr__(self, "top_p", ctypes.c_float(self.top_p).value)
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvalidArgument(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not math.isfinite(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != NO_TOP_K and not 1 <= self.top_k <= MAX_TOP_K:
            raise InvalidArgument(
                f"top_k must be in [1, {MAX_TOP_K}], or {NO_TOP_K} for no limit, got {self.top_k}"
            )
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed must be in [0, 2**64), got {self.seed}")
        if self.max_tokens < 1:
            raise InvalidArgument(f"max_tokens must be >= 1, got {self.max_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidArgument(f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}")
        if self.speculate is not None and not 0 <= self.speculate <= MAX_SPECULATE:
            raise InvalidArgument(f"speculate must be in [0, {MAX_SPECULATE}], got {self.speculate}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidArgument(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(self.stop)}")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidArgument(f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument(
                f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed, got {len(self.stop_token_ids)}"
            )

    def ending_ids(self, eos_token_ids: Sequence[int]) -> frozenset[int]:
        """Token ids that end the request: the stop tokens, and the checkpoint's eos ids unless ignored."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))


def seed_from_request_id(request_id: str) -> int:
    """The seed of a request that named none: any router derives the same one. Unsigned 64-bit."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
