"""Sampling parameters of one request, validated once at the door."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pd_engine.errors import InvalidArgument, shown

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION = 100.0  # as a factor, either way
MAX_SPECULATE = 8
NO_TOP_K = -1
MAX_CHOICES = 128  # of a request, all its prompts together
MAX_TOP_K = 2**31 - 1  # as it travels

LogitBias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What the sampler needs. Greedy is `temperature == 0`.

    Real numbers are rounded to float32, which is what travels to a worker: one process computes with the same numbers.
    What each does to the logits, and in which order: `pd_engine.sampling.processor`.

    Attributes:
        temperature: >= 0.
        top_p: in (0, 1].
        top_k: in [1, `MAX_TOP_K`], or `NO_TOP_K`.
        min_p: in [0, 1]; 0 is no limit. Tokens less likely than this share of the most likely one are left out.
        repetition_penalty: in [0.01, 100]; 1 is none. Over the tokens of the prompt and the generated ones.
        presence_penalty, frequency_penalty: in [-2, 2]; 0 is none. Over the generated tokens.
        logit_bias: (token id, what is added to its logit, in [-100, 100]), each id once.
        seed: unsigned 64-bit; all randomness of the request comes from it (architecture: sampling keyed by position).
        max_tokens: >= 1, tokens to generate at most.
        min_tokens: in [0, max_tokens]; no ending token is sampled, and no stop string counts, before so many.
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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculate: int | None = None

    def __post_init__(self) -> None:
        """Raises:
        InvalidArgument: a value is outside its range; the message names the field and the range.
        """
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, _float32(getattr(self, name)))
        object.__setattr__(self, "logit_bias", tuple((token, _float32(bias)) for token, bias in self.logit_bias))
        self._check_distribution()
        self._check_penalties()
        self._check_ends()
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed must be in [0, 2**64), got {shown(self.seed)}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidArgument(f"logprobs must be in [0, {MAX_LOGPROBS}], got {shown(self.logprobs)}")
        if self.speculate is not None and not 0 <= self.speculate <= MAX_SPECULATE:
            raise InvalidArgument(f"speculate must be in [0, {MAX_SPECULATE}], got {shown(self.speculate)}")

    @property
    def changes_logits(self) -> bool:
        """Whether a row of logits is processed before the sampler sees it (`pd_engine.sampling.processor`)."""
        return self.min_tokens > 0 or self.has_edits

    @property
    def has_edits(self) -> bool:
        """Whether that goes on to the end, not only up to min_tokens."""
        return bool(self.logit_bias) or self.penalizes

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far count."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def ending_ids(self, eos_token_ids: Sequence[int]) -> frozenset[int]:
        """Token ids that end the request: the stop tokens, and the checkpoint's eos ids unless ignored."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))

    def _check_distribution(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvalidArgument(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != NO_TOP_K and not 1 <= self.top_k <= MAX_TOP_K:
            raise InvalidArgument(
                f"top_k must be in [1, {MAX_TOP_K}], or {NO_TOP_K} for no limit, got {shown(self.top_k)}"
            )
        if not 0 <= self.min_p <= 1:
            raise InvalidArgument(f"min_p must be in [0, 1], got {self.min_p}")

    def _check_penalties(self) -> None:
        if not _float32(1 / MAX_REPETITION) <= self.repetition_penalty <= MAX_REPETITION:
            raise InvalidArgument(
                f"repetition_penalty must be in [{1 / MAX_REPETITION:g}, {MAX_REPETITION:g}], "
                f"got {self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                raise InvalidArgument(
                    f"{name} must be in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}], got {getattr(self, name)}"
                )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidArgument(f"logit_bias has at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidArgument(
                    f"logit_bias must be in [{-MAX_BIAS:g}, {MAX_BIAS:g}], got {bias} for token {token_id}"
                )
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise InvalidArgument("logit_bias must name each token once")

    def _check_ends(self) -> None:
        if self.max_tokens < 1:
            raise InvalidArgument(f"max_tokens must be >= 1, got {shown(self.max_tokens)}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidArgument(
                f"min_tokens must be in [0, {self.max_tokens}], which is max_tokens, "
                f"got {shown(self.min_tokens)}"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidArgument(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(self.stop)}")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidArgument(f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument(
                f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed, got {len(self.stop_token_ids)}"
            )


def seed_from_request_id(request_id: str) -> int:
    """The seed of a request that named none: any router derives the same one. Unsigned 64-bit."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def seed_of_choice(seed: int, choice: int) -> int:
    """Of choice `choice` of n under one seed, unsigned 64-bit. The first has the seed itself: n is 1 or more, its
    tokens are the same."""
    if choice == 0:
        return seed
    data = seed.to_bytes(8, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _float32(value: float) -> float:
    """Rounded; infinite if it is too large, as no range allows."""
    try:
        return ctypes.c_float(value).value
    except OverflowError:  # an integer beyond all floats
        return math.inf if value > 0 else -math.inf
