"""What came of a request, in a form in which one process and a cluster can be compared bit for bit. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pd_engine.contracts import api_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobBits:
    """Logprobs of one token: float32 as 4 bytes, so that equal means the same bits."""

    token_id: int
    logprob: bytes
    top: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A finished request.

    Attributes:
        block_checksums: of the prompt's blocks, component-major; empty if nothing was handed over or computed at the
            decode worker.
        handoff_bytes: moved; None if nothing was handed over, as in one process.
        is_local: the decode worker has computed the prompt.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: str
    seed: int
    logprobs: tuple[LogprobBits, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    block_checksums: tuple[int, ...]
    handoff_bytes: int | None
    is_local: bool = False


def logprob_bits(token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> LogprobBits:
    return LogprobBits(
        token_id=token_id, logprob=_bits(logprob), top=tuple((other, _bits(value)) for other, value in top)
    )


def outcome_of(complete: api_pb2.GenerateComplete) -> Outcome:
    """Of a cluster's answer."""
    has_handoff = complete.HasField("handoff")
    return Outcome(
        token_ids=tuple(complete.output_ids), text=complete.text, finish_reason=complete.finish_reason,
        stop_reason=complete.stop_reason, seed=complete.seed,
        logprobs=tuple(
            logprob_bits(one.token_id, one.logprob, list(zip(one.top_token_ids, one.top_logprobs, strict=True)))
            for one in complete.logprobs
        ),
        num_prompt_tokens=complete.usage.prompt_tokens, num_cached_tokens=complete.usage.cached_tokens,
        block_checksums=tuple(
            complete.handoff.block_checksums if has_handoff else complete.local_prefill.block_checksums
        ),
        handoff_bytes=complete.handoff.bytes if has_handoff else None,
        is_local=complete.HasField("local_prefill"),
    )


def first_difference(
    expected: Outcome, got: Outcome, *, bytes_per_token: int, shared_block_tokens: int | None = None,
    is_local: bool = False,
) -> str | None:
    """What is wrong with `got`, a remote run, against one process; None if it is the same, bit for bit.

    A request of more than one token must have been handed over: every slot of the prompt that was not held, every
    component. One that the decode worker was to compute must have been, and no more: all blocks are there.

    Args:
        is_local: it was to be computed at the decode worker.
        shared_block_tokens: tokens a block, where blocks of earlier requests may have been used; None: cold, nothing
            was cached or held.
    """
    if (difference := answer_difference(expected, got)) is not None:
        return difference
    if not _is_possible(got.num_cached_tokens, expected.num_prompt_tokens, shared_block_tokens):
        return f"num_cached_tokens: {got.num_cached_tokens} of {expected.num_prompt_tokens} is impossible"
    if got.is_local != is_local:
        return f"the decode worker has {'' if got.is_local else 'not '}computed the prompt"
    if is_local:
        if got.handoff_bytes is not None:
            return f"{got.handoff_bytes} bytes were handed over instead of none"
        return _sequence_difference("block checksum", expected.block_checksums, got.block_checksums)
    return _handoff_difference(expected, got, bytes_per_token, shared_block_tokens)


def answer_difference(expected: Outcome, got: Outcome) -> str | None:
    """What is wrong with the answer itself, however it came about; None if it is the same, bit for bit."""
    for name in ("num_prompt_tokens", "finish_reason", "stop_reason", "seed"):
        wanted, found = getattr(expected, name), getattr(got, name)
        if wanted != found:
            return f"{name}: {found!r} instead of {wanted!r}"
    if (difference := _sequence_difference("token", expected.token_ids, got.token_ids)) is not None:
        return difference
    if (difference := _logprobs_difference(expected.logprobs, got.logprobs)) is not None:
        return difference
    return None if expected.text == got.text else f"text: {got.text!r} instead of {expected.text!r}"


def _is_possible(num_shared_tokens: int, num_prompt_tokens: int, shared_block_tokens: int | None) -> bool:
    """Whole blocks of the prompt, or nothing where nothing may be shared."""
    if shared_block_tokens is None:
        return num_shared_tokens == 0
    return 0 <= num_shared_tokens <= num_prompt_tokens and num_shared_tokens % shared_block_tokens == 0


def _handoff_difference(
    expected: Outcome, got: Outcome, bytes_per_token: int, shared_block_tokens: int | None
) -> str | None:
    if got.handoff_bytes is None:
        return None if len(expected.token_ids) == 1 else "nothing was handed over"
    num_held_bytes = expected.num_prompt_tokens * bytes_per_token - got.handoff_bytes
    num_held_tokens, rest = divmod(num_held_bytes, bytes_per_token)
    if rest or not _is_possible(num_held_tokens, expected.num_prompt_tokens, shared_block_tokens):
        whole = expected.num_prompt_tokens * bytes_per_token
        return f"{got.handoff_bytes} bytes were handed over instead of {whole}" + (
            "" if shared_block_tokens is None else f" less whole blocks of {shared_block_tokens} tokens"
        )
    wanted = list(expected.block_checksums)
    if num_held_tokens:
        assert shared_block_tokens is not None
        num_blocks = -(-expected.num_prompt_tokens // shared_block_tokens)
        num_held_blocks = num_held_tokens // shared_block_tokens
        wanted = [0 if place % num_blocks < num_held_blocks else value for place, value in enumerate(wanted)]
    return _sequence_difference("block checksum", wanted, got.block_checksums)


def _sequence_difference(what: str, expected: Sequence[int], got: Sequence[int]) -> str | None:
    for index, (wanted, found) in enumerate(zip(expected, got, strict=False)):
        if wanted != found:
            return f"{what} {index}: {found} instead of {wanted}"
    return None if len(expected) == len(got) else f"{len(got)} {what}s instead of {len(expected)}"


def _logprobs_difference(expected: Sequence[LogprobBits], got: Sequence[LogprobBits]) -> str | None:
    for index, (wanted, found) in enumerate(zip(expected, got, strict=False)):
        if wanted != found:
            return f"logprobs of token {index}: {_readable(found)} instead of {_readable(wanted)}"
    return None if len(expected) == len(got) else f"{len(got)} logprobs instead of {len(expected)}"


def _bits(value: float) -> bytes:
    return struct.pack(">f", value)


def _readable(one: LogprobBits) -> str:
    top = ", ".join(f"{token_id}: {bits.hex()}" for token_id, bits in one.top)
    return f"{one.token_id} {one.logprob.hex()} [{top}]"
