"""One request in one process, alone: the oracle for everything that is distributed."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pd_engine.cache.checksums import slot_checksums
from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import FinishReason, SampledToken, Sequence, TokenLogprobs
from pd_engine.steps.decode import decode_step, finish_reason
from pd_engine.steps.prefill import Chunk, prefill_step, sample_first
from pd_engine.text.defaults import ModelLimits, check_prompt
from pd_engine.text.output import OutputText
from pd_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What one step gave: tokens `index`, `index`+1, ... of the answer, and the text that is now certain. Text may lag
    behind tokens (half a character, the beginning of a stop string)."""

    index: int
    tokens: tuple[SampledToken, ...]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        token_ids: generated; a stop token, or the token that completes a stop string, is the last one.
        text: of the tokens, cut before a stop string.
        stop_reason: the stop string, or the stop token's id in decimal; empty otherwise.
        logprobs: one a token if they were asked for, else empty.
        drafted_tokens, accepted_tokens: of speculation.
        prompt_checksums: of the prompt's slots if they were asked for (`slot_checksums`), else empty.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str
    seed: int
    logprobs: tuple[TokenLogprobs, ...]
    usage: Usage
    drafted_tokens: int
    accepted_tokens: int
    prompt_checksums: tuple[int, ...]


def generate(
    engine: Engine, tokenizer: Tokenizer, prompt_ids: Seq[int], params: SamplingParams, *, chunk_tokens: int = 256,
    speculate: int = 0, checksums: bool = False,
) -> Generation:
    """Runs one request to its end. Arguments and errors as in `generate_stream`."""
    *_, last = generate_stream(
        engine, tokenizer, prompt_ids, params, chunk_tokens=chunk_tokens, speculate=speculate, checksums=checksums
    )
    assert isinstance(last, Generation)
    return last


def generate_stream(
    engine: Engine, tokenizer: Tokenizer, prompt_ids: Seq[int], params: SamplingParams, *, chunk_tokens: int = 256,
    speculate: int = 0, checksums: bool = False,
) -> Iterator[Delta | Generation]:
    """The same, step by step: a `Delta` a step, then the `Generation`. Blocks are released at the end, or when the
    iterator is closed.

    Args:
        chunk_tokens: prompt tokens computed in one step at most.
        speculate: draft tokens a step where `params` do not say; none without an MTP layer.
        checksums: whether to report the checksums of the prompt's slots.

    Raises:
        InvalidArgument: the prompt is empty, too long or holds ids outside the vocabulary, or prompt and max_tokens
            together exceed the context.
        ResourceExhausted: they exceed the cache.
    """
    sequence = _new_sequence(engine, tokenizer, prompt_ids, params, speculate)
    layout = engine.layout
    sequence.block_ids = engine.pool.allocate(
        layout.num_blocks_for(len(prompt_ids) + params.max_tokens - 1), sequence.name
    )
    try:
        while sequence.num_computed < len(prompt_ids):
            count = min(chunk_tokens, len(prompt_ids) - sequence.num_computed)
            prefill_step(engine, [Chunk(sequence=sequence, num_tokens=count)])
        prompt_checksums = (
            slot_checksums(engine.ops, engine.arena, sequence.block_ids, len(prompt_ids)) if checksums else []
        )
        output = OutputText(tokenizer, params.stop, min_tokens=params.min_tokens)
        yield from _answer(engine, output, sequence, tuple(prompt_checksums))
    finally:
        engine.pool.release(sequence.block_ids, sequence.name)


def _new_sequence(
    engine: Engine, tokenizer: Tokenizer, prompt_ids: Seq[int], params: SamplingParams, speculate: int
) -> Sequence:
    limits = ModelLimits(max_context_length=engine.max_context_length, vocab_size=engine.config.vocab_size)
    check_prompt(prompt_ids, limits)
    room = engine.max_context_length - len(prompt_ids)
    if params.max_tokens > room:
        raise InvalidArgument(
            f"max_tokens must be at most {room} after a prompt of {len(prompt_ids)} tokens in a context of "
            f"{engine.max_context_length}, got {params.max_tokens}"
        )
    wanted = speculate if params.speculate is None else params.speculate
    return Sequence(
        name="generate",
        token_ids=list(prompt_ids),
        num_prompt_tokens=len(prompt_ids),
        params=params,
        ending_ids=params.ending_ids(tokenizer.eos_token_ids),
        speculate=wanted if engine.has_mtp else 0,
    )


def _answer(
    engine: Engine, output: OutputText, sequence: Sequence, prompt_checksums: tuple[int, ...]
) -> Iterator[Delta | Generation]:
    """Decodes a sequence whose prompt is computed."""
    emitted: list[SampledToken] = []
    text = ""
    tokens, reason = sample_first(engine, [sequence]), finish_reason(engine, sequence)
    while True:
        shown, stop_string, count = _push(output, tokens)
        if reason is not None and not stop_string:
            shown += output.finish()
        text += shown
        yield Delta(index=len(emitted), tokens=tuple(tokens[:count]), text=shown)
        emitted += tokens[:count]
        if stop_string or reason is not None:
            break
        [step] = decode_step(engine, [sequence])
        tokens, reason = step.tokens, step.finish_reason
    if stop_string:
        reason, stop_reason = FinishReason.STOP, stop_string
    else:
        stop_reason = str(emitted[-1].token_id) if reason is FinishReason.STOP else ""
    assert reason is not None
    yield Generation(
        token_ids=tuple(token.token_id for token in emitted),
        text=text,
        finish_reason=reason,
        stop_reason=stop_reason,
        seed=sequence.params.seed,
        logprobs=tuple(token.logprobs for token in emitted if token.logprobs is not None),
        usage=Usage(prompt_tokens=sequence.num_prompt_tokens, completion_tokens=len(emitted)),
        drafted_tokens=sequence.num_drafted,
        accepted_tokens=sequence.num_accepted,
        prompt_checksums=prompt_checksums,
    )


def _push(output: OutputText, tokens: Seq[SampledToken]) -> tuple[str, str, int]:
    """(text, the stop string or "", how many of the tokens belong to the answer): it ends with a stop string."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        delta = output.push(token.token_id)
        text += delta.text
        if delta.stop_reason is not None:
            return text, delta.stop_reason, count
    return text, "", len(tokens)
