"""Checks what arrives in internal calls, once, at the door. Every function returns parsed values or raises
`InvalidArgument` with the field, what it was and what is allowed. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import InvalidArgument
from pd_engine.hashing import HASH_BYTES
from pd_engine.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, LogitBias, SamplingParams

MAX_ID_CHARS = 128
MAX_SALT_CHARS = 256
MAX_EOS_TOKEN_IDS = 64
MAX_LEASE_MS = 3_600_000
MAX_JOURNEYS_A_CALL = 10_000
_OPTIONAL_FIELDS = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
_HEX_ID = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"[0-9A-Za-z.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
_PORT = re.compile(r"[0-9]{1,5}")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the served model allows."""

    vocab_size: int
    max_context_length: int
    block_size: int
    max_speculate: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One choice as every worker needs it.

    Attributes:
        token_ids: prompt and emitted ids.
        num_prompt_tokens: how many are the prompt.
        params: sampling; `max_tokens` counts the emitted ones too.
        ending_ids: token ids that end it.
        speculate: draft tokens a step; 0 is off.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    ending_ids: frozenset[int]
    speculate: int

    @property
    def num_emitted_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def parse_id(field: str, value: str) -> str:
    """A router's id: printable ASCII without blanks."""
    if len(value) > MAX_ID_CHARS or not _PRINTABLE.fullmatch(value):
        raise InvalidArgument(f"{field} must be 1 to {MAX_ID_CHARS} printable characters, got {value[:64]!r}")
    return value


def parse_hex_id(field: str, value: str) -> str:
    """An epoch, a lease's id or a handoff's token."""
    if not _HEX_ID.fullmatch(value):
        raise InvalidArgument(f"{field} must be 32 lower-case hexadecimal digits, got {value[:64]!r}")
    return value


def parse_address(field: str, value: str) -> str:
    """"host:port" of a peer; nothing that a resolver would read as another scheme."""
    host, _, port = value.rpartition(":")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise InvalidArgument(f"{field} must be host:port, got {value[:64]!r}")
    return value


def parse_salt(value: str) -> str:
    if len(value) > MAX_SALT_CHARS:
        raise InvalidArgument(f"cache_salt has at most {MAX_SALT_CHARS} characters, got {len(value)}")
    return value


def parse_lease_ms(value: int) -> int:
    if not 1 <= value <= MAX_LEASE_MS:
        raise InvalidArgument(f"lease_ms must be in [1, {MAX_LEASE_MS}], got {value}")
    return value


def parse_block_hashes(hashes: Sequence[bytes], *, num_prompt_tokens: int, block_size: int) -> tuple[bytes, ...]:
    """Hashes of the prompt's full blocks: none, or all of them."""
    allowed = (0, num_prompt_tokens // block_size)
    if len(hashes) not in allowed:
        raise InvalidArgument(f"block_hashes must hold {allowed[1]} hashes or none, got {len(hashes)}")
    for index, value in enumerate(hashes):
        if len(value) != HASH_BYTES:
            raise InvalidArgument(f"block_hashes[{index}] must have {HASH_BYTES} bytes, got {len(value)}")
    return tuple(hashes)


def parse_num_held_blocks(value: int, *, num_tokens: int, block_size: int) -> int:
    """Leading full blocks that a destination has."""
    if value > num_tokens // block_size:
        raise InvalidArgument(
            f"num_held_blocks must be in [0, {num_tokens // block_size}] for {num_tokens} tokens, got {value}"
        )
    return value


def parse_choice(token_ids: Sequence[int], num_prompt_tokens: int, sampling: pb.Sampling, limits: Limits) -> Choice:
    """Token ids in the vocabulary, lengths that fit the context, sampling values in range, something left to do."""
    if not 1 <= num_prompt_tokens <= len(token_ids):
        raise InvalidArgument(f"num_prompt_tokens must be in [1, {len(token_ids)}], got {num_prompt_tokens}")
    if len(token_ids) >= limits.max_context_length:
        raise InvalidArgument(
            f"{len(token_ids)} tokens leave no room for another one in a context of {limits.max_context_length}"
        )
    if max(token_ids) >= limits.vocab_size:
        bad = next(index for index, token_id in enumerate(token_ids) if token_id >= limits.vocab_size)
        raise InvalidArgument(
            f"token_ids[{bad}] must be in [0, {limits.vocab_size}), the vocabulary, got {token_ids[bad]}"
        )
    choice = Choice(
        token_ids=tuple(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        params=parse_sampling(sampling, limits),
        ending_ids=frozenset(sampling.stop_token_ids),
        speculate=min(sampling.speculate, limits.max_speculate),
    )
    _check_lengths(choice, limits)
    return choice


def parse_sampling(sampling: pb.Sampling, limits: Limits) -> SamplingParams:
    """The sampler's part. `stop_token_ids` has eos in it unless eos is ignored, so the two are told apart no more."""
    allowed = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS
    if len(sampling.stop_token_ids) > allowed:
        raise InvalidArgument(f"at most {allowed} stop_token_ids are allowed, got {len(sampling.stop_token_ids)}")
    for token_id in sampling.stop_token_ids:
        if token_id >= limits.vocab_size:
            raise InvalidArgument(f"stop_token_ids must be in [0, {limits.vocab_size}), got {token_id}")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidArgument(f"logit_bias has at most {MAX_LOGIT_BIAS} tokens, got {len(sampling.logit_bias)}")
    if sampling.logprobs < -1:
        raise InvalidArgument(f"logprobs must be >= 0, or -1 for none, got {sampling.logprobs}")
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        ignore_eos=True,
        logprobs=None if sampling.logprobs < 0 else sampling.logprobs,
        speculate=sampling.speculate,
        logit_bias=_parse_logit_bias(sampling, limits),
        **{name: getattr(sampling, name) for name in _OPTIONAL_FIELDS if sampling.HasField(name)},
    )


def _parse_logit_bias(sampling: pb.Sampling, limits: Limits) -> LogitBias:
    for token_id in sampling.logit_bias:
        if token_id >= limits.vocab_size:
            raise InvalidArgument(f"token ids of logit_bias must be in [0, {limits.vocab_size}), got {token_id}")
    return tuple(sorted(sampling.logit_bias.items()))


def _check_lengths(choice: Choice, limits: Limits) -> None:
    total = choice.num_prompt_tokens + choice.params.max_tokens
    if total > limits.max_context_length:
        raise InvalidArgument(
            f"prompt ({choice.num_prompt_tokens} tokens) and max_tokens ({choice.params.max_tokens}) must fit the "
            f"context of {limits.max_context_length} tokens together"
        )
    emitted = choice.token_ids[choice.num_prompt_tokens :]
    if len(emitted) >= choice.params.max_tokens:
        raise InvalidArgument(f"{len(emitted)} tokens were emitted, max_tokens is {choice.params.max_tokens}")
    if any(token_id in choice.ending_ids for token_id in emitted):
        raise InvalidArgument("an emitted token has ended this choice already")


def check_count(field: str, count: int) -> None:
    """A list that is worked through at once, in the event loop, is bounded."""
    if count > MAX_JOURNEYS_A_CALL:
        raise InvalidArgument(f"{field} has at most {MAX_JOURNEYS_A_CALL} entries, got {count}")
