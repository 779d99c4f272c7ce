"""One decode step: draft with the MTP layer, verify in one forward, emit what the target model samples.

For a sequence of n tokens (the last one not computed yet) and k drafts:

1. MTP runs over the positions that it has not seen true states of, up to n-1; the last of these rows drafts token n,
   and k-1 further rows, each from the one before, draft tokens n+1 .. n+k-1.
2. The main model runs over [token n-1, drafts] at positions n-1 .. n+k-1.
3. Row j samples token n+j with that position's noise. Draft j is accepted exactly when it is equal to the token that
   row j samples, so the emitted tokens are those of plain decoding, whatever was drafted.
4. The accepted rows' h wait for the next step's MTP rows, or for `draft.catch_up` while no drafts are made.

Rejected drafts leave no trace: slots n.. of the main layers and n.. of MTP's are written again, in the step that has
the true token for them, before any row may read them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.model.mla import StepRows
from pd_engine.sampling.params import MAX_SPECULATE
from pd_engine.sequence import FinishReason, SampledToken, Sequence
from pd_engine.steps.draft import catch_up, draft_tokens, num_wanted_drafts, pending_states
from pd_engine.steps.overflow import all_or_raise, finite_rows, overflow_error
from pd_engine.steps.rows import Span, build_step, tensor
from pd_engine.steps.sample import Place, sample_rows, token_logprobs
from pd_engine.steps.state import can_draft
from pd_kernels.ops import Rows
from pd_kernels.repeat import repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOutput:
    """What one step gave one sequence: at least one token."""

    tokens: list[SampledToken]
    num_drafted: int
    num_accepted: int
    finish_reason: FinishReason | None


def num_slots_needed(sequence: Sequence) -> int:
    """Slots that the next decode step of this sequence writes to at most: its block_ids must cover them."""
    return sequence.num_tokens + num_wanted_drafts(sequence)


def decode_step(engine: Engine, sequences: Seq[Sequence], max_drafts: int = MAX_SPECULATE) -> list[DecodeOutput]:
    """Runs one step for all sequences, which must differ, not be finished, and have blocks for `num_slots_needed`.

    Appends the emitted tokens to each sequence: never more than max_tokens and the engine's context length leave room
    for, and none after a stop token.

    Args:
        max_drafts: for each sequence, whatever it would like (`pd_engine.steps.speculation`).

    Raises:
        Internal: the logits that one needs next are not finite. The others have advanced.
    """
    return all_or_raise(try_decode_step(engine, sequences, max_drafts))


def try_decode_step(
    engine: Engine, sequences: Seq[Sequence], max_drafts: int = MAX_SPECULATE
) -> list[DecodeOutput | Internal]:
    """Like `decode_step`; a sequence whose next token's logits are not finite gets an error in place of tokens, and is
    left as it was: it cannot go on."""
    for sequence in sequences:
        assert sequence.num_computed == sequence.num_tokens - 1, (sequence.name, sequence.num_computed)
    drafts = draft_tokens(engine, sequences, max_drafts)
    spans = [
        Span(sequence=sequence, start=sequence.num_computed, count=1 + len(drafted))
        for sequence, drafted in zip(sequences, drafts, strict=True)
    ]
    ids = [[sequence.token_ids[-1], *drafted] for sequence, drafted in zip(sequences, drafts, strict=True)]
    flat_ids = [token for span_ids in ids for token in span_ids]
    ids_T = tensor(np.array(flat_ids, dtype=np.int64), engine.ops.device)
    step = build_step(spans, engine.layout.block_size, engine.ops.device)
    hidden_TD, logits_TZ = _forward(engine, ids_T, step)
    sampled = _sample_spans(engine, logits_TZ, sequences, drafts)
    finite = iter(finite_rows(logits_TZ))
    counts = [
        _num_emitted(sequence, tokens, drafted, list(islice(finite, len(tokens))))
        for sequence, tokens, drafted in zip(sequences, sampled, drafts, strict=True)
    ]
    emitted = _with_logprobs(engine, logits_TZ, spans, sampled, counts)
    first = 0
    for sequence, tokens, drafted in zip(sequences, emitted, drafts, strict=True):
        if tokens:
            _advance(sequence, tokens, hidden_TD[first : first + len(tokens)], len(drafted))
        first += 1 + len(drafted)
    catch_up(
        engine, [sequence for sequence, drafted in zip(sequences, drafts, strict=True) if not drafted],
        ended=[sequence for sequence in sequences if finish_reason(engine, sequence) is not None],
    )
    return [
        DecodeOutput(
            tokens=tokens, num_drafted=len(drafted), num_accepted=len(tokens) - 1,
            finish_reason=finish_reason(engine, sequence),
        ) if tokens else overflow_error(sequence.num_tokens)
        for sequence, tokens, drafted in zip(sequences, emitted, drafts, strict=True)
    ]


def finish_reason(engine: Engine, sequence: Sequence) -> FinishReason | None:
    """Why a sequence ends after its last token, the engine's context length included; None if it goes on."""
    reason = sequence.finish_reason()
    if reason is None and sequence.num_tokens >= engine.max_context_length:
        return FinishReason.LENGTH
    return reason


def _forward(engine: Engine, ids_T: Tensor, step: StepRows) -> tuple[Tensor, Tensor]:
    """(h_TD, logits_TZ) of the main model: valid until the next decode step, whose ops may reuse their room."""

    def run(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        hidden_TD = engine.main.forward(tensors[0], StepRows(rows=rows), engine.main_caches)
        return hidden_TD, engine.main.logits(hidden_TD)

    hidden_TD, logits_TZ = repeat(engine.ops, "main", run, (ids_T,), step.rows)
    return hidden_TD, logits_TZ


def _sample_spans(
    engine: Engine, logits_TZ: Tensor, sequences: Seq[Sequence], drafts: Seq[Seq[int]]
) -> list[list[int]]:
    """The target's token after each row, by sequence. A row behind drafts takes them as generated, which they are if
    it comes to matter: it is emitted only if they were all accepted."""
    places = [
        Place(sequence, drafted[:count])
        for sequence, drafted in zip(sequences, drafts, strict=True)
        for count in range(len(drafted) + 1)
    ]
    tokens = iter(sample_rows(engine.ops, logits_TZ, places))
    return [list(islice(tokens, len(drafted) + 1)) for drafted in drafts]


def _num_emitted(sequence: Sequence, tokens: Seq[int], drafted: Seq[int], finite: Seq[bool]) -> int:
    """How many of the sampled tokens are emitted: up to the first that its draft did not foresee, or that ends the
    sequence. There is room for all of them, since no more were drafted (`num_wanted_drafts`).

    Rows whose logits are not finite give none. The first of them stops a sequence only in the step that begins with
    it, as without drafts: a row behind a draft that is not accepted means nothing.
    """
    count = 1
    for token, draft in zip(tokens, drafted, strict=False):
        if draft != token or token in sequence.ending_ids:
            break
        count += 1
    return count if all(finite[:count]) else finite.index(False)


def _with_logprobs(
    engine: Engine, logits_TZ: Tensor, spans: Seq[Span], sampled: Seq[Seq[int]], counts: Seq[int]
) -> list[list[SampledToken]]:
    """The emitted tokens of each span, with the logprobs that its sequence asked for."""
    tokens: list[int] = []
    num_tops: list[int | None] = []
    for span, span_tokens, count in zip(spans, sampled, counts, strict=True):
        # Rows behind the emitted ones are passed over.
        tokens += span_tokens
        num_tops += [span.sequence.params.logprobs] * count + [None] * (span.count - count)
    pairs = iter(zip(tokens, token_logprobs(engine.ops, logits_TZ, tokens, num_tops), strict=True))
    return [
        [SampledToken(token_id=token, logprobs=item) for token, item in islice(pairs, span.count)][:count]
        for span, count in zip(spans, counts, strict=True)
    ]


def _advance(sequence: Sequence, tokens: Seq[SampledToken], hidden: Tensor, num_drafted: int) -> None:
    """Appends the emitted tokens, and keeps the h of the rows that they stand on for the MTP layer's next rows.

    A sequence that does not speculate keeps only the last one; its MTP slots then end where they are.
    """
    if num_drafted:
        pending = hidden.clone()
    elif sequence.speculate and can_draft(sequence):
        pending = torch.cat([pending_states(sequence), hidden])
    else:
        pending = hidden[-1:].clone()
    sequence.token_ids += [token.token_id for token in tokens]
    sequence.num_computed += len(tokens)
    sequence.num_drafted += num_drafted
    sequence.num_accepted += len(tokens) - 1
    sequence.pending_hidden = pending
