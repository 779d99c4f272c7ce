"""Prompt chunks: several sequences packed in one step, the main layers first and then the slots of the MTP layer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.sequence import SampledToken, Sequence
from pd_engine.steps.overflow import all_or_raise, finite_rows, overflow_error
from pd_engine.steps.rows import Span, build_step, token_ids
from pd_engine.steps.sample import Place, sample_rows, token_logprobs
from pd_engine.steps.state import can_draft, last_hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The next `num_tokens` known tokens of a sequence."""

    sequence: Sequence
    num_tokens: int


def prefill_step(
    engine: Engine, chunks: Seq[Chunk], on_component: Callable[[int], None] | None = None
) -> None:
    """Computes each chunk: writes its latents, raises num_computed and num_computed_mtp, leaves its last h.

    The caller guarantees that the sequences differ and that block_ids cover the chunks. To have the last h of a
    sequence whose latents are all cached, set num_computed one lower than num_computed_mtp: the last token is then
    computed again, which writes the same bits to its slot.

    Args:
        on_component: called with a component's index when its slots of this step are final: layers in order, MTP last.
    """
    spans = [
        Span(sequence=chunk.sequence, start=chunk.sequence.num_computed, count=chunk.num_tokens) for chunk in chunks
    ]
    for span in spans:
        assert span.count >= 1 and span.end <= span.sequence.num_tokens, (span.sequence.name, span.start, span.count)
    step = build_step(
        spans, engine.layout.block_size, engine.ops.device, expand_prompts=engine.expand_prompts
    )
    on_written = on_component or (lambda component: None)
    hidden_TD = engine.main.forward(token_ids(spans, engine.ops.device), step, engine.main_caches, on_written)
    hiddens = torch.split(hidden_TD, [span.count for span in spans])
    if engine.mtp is not None:
        _write_mtp(engine, spans, hiddens)
        on_written(engine.mtp_component)
    for span, hidden in zip(spans, hiddens, strict=True):
        span.sequence.num_computed = span.end
        span.sequence.pending_hidden = hidden[-1:].clone()


def sample_first(engine: Engine, sequences: Seq[Sequence]) -> list[SampledToken]:
    """Samples the token after the last computed one of each sequence, from its last h, and appends it.

    All known tokens of the sequences must have been computed: a whole prompt, or a prompt and the tokens that were
    already emitted.

    Raises:
        Internal: the logits of one are not finite. The others have their tokens.
    """
    return all_or_raise(try_sample_first(engine, sequences))


def try_sample_first(engine: Engine, sequences: Seq[Sequence]) -> list[SampledToken | Internal]:
    """Like `sample_first`; a sequence whose logits are not finite gets an error in place of a token."""
    for sequence in sequences:
        assert sequence.num_computed == sequence.num_tokens, (sequence.name, sequence.num_computed, sequence.num_tokens)
    logits_TZ = engine.main.logits(torch.cat([last_hidden(sequence) for sequence in sequences]))
    tokens = sample_rows(engine.ops, logits_TZ, [Place(sequence) for sequence in sequences])
    logprobs = token_logprobs(engine.ops, logits_TZ, tokens, [sequence.params.logprobs for sequence in sequences])
    outcomes: list[SampledToken | Internal] = []
    for sequence, token, item, finite in zip(sequences, tokens, logprobs, finite_rows(logits_TZ), strict=True):
        if finite:
            sequence.token_ids.append(token)
            outcomes.append(SampledToken(token_id=token, logprobs=item))
        else:
            outcomes.append(overflow_error(sequence.num_tokens))
    return outcomes


def _write_mtp(engine: Engine, spans: Seq[Span], hiddens: Seq[Tensor]) -> None:
    """MTP slots of every position up to the chunk's end that has none yet."""
    assert engine.mtp is not None
    mtp_spans, previous = [], []
    for span, hidden in zip(spans, hiddens, strict=True):
        sequence = span.sequence
        first = max(sequence.num_computed_mtp, 1)
        states, start = (hidden, span.start)
        if can_draft(sequence):
            assert sequence.pending_hidden is not None
            states, start = torch.cat([sequence.pending_hidden, hidden]), sequence.num_computed_mtp - 1
        if first - 1 < start:
            continue  # an h is missing: the main layers came from a cache without MTP slots
        if sequence.num_computed_mtp == 0:
            _zero_first_slot(engine, sequence)
        if first < span.end:
            mtp_spans.append(Span(sequence=sequence, start=first, count=span.end - first))
            previous.append(states[first - 1 - start : -1])
        sequence.num_computed_mtp = max(sequence.num_computed_mtp, span.end)
    if mtp_spans:
        rows = build_step(mtp_spans, engine.layout.block_size, engine.ops.device).rows
        engine.mtp.write_slots(token_ids(mtp_spans, engine.ops.device), torch.cat(previous), rows, engine.mtp_cache)


def _zero_first_slot(engine: Engine, sequence: Sequence) -> None:
    """Slot 0 has no h before it. It is zero, so that a block's bytes depend on its tokens only."""
    engine.mtp_cache.slots_GKE[sequence.block_ids[0], 0] = 0
