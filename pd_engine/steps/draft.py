"""Drafting: MTP rows over what it has not seen true states of, then one row after the other.

For a sequence of n tokens whose MTP slots are final up to m: rows m .. n-1 take the waiting h of positions m-1 .. n-2,
and the last of them drafts token n. Each further draft takes the state of the row before it.

The rows before the last one are only to be remembered, which costs little: they write their slots and go no further.
So a sequence that makes no drafts for a while is kept able to: its waiting states are turned into slots from time to
time (`Mtp.write_slots`), and are never many.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pd_engine.engine import Engine
from pd_engine.model.mla import StepRows
from pd_engine.sequence import Sequence
from pd_engine.steps.rows import Span, build_step, token_ids
from pd_engine.steps.sample import Place, sample_rows
from pd_engine.steps.state import can_draft, last_hidden
from pd_kernels.ops import Rows
from pd_kernels.repeat import repeat

MAX_WAITING_STATES = 64   # of one sequence
MANY_WAITING_STATES = 32  # enough of them at a time that a row costs little


def num_wanted_drafts(sequence: Sequence) -> int:
    """No more drafts than could be emitted beside the token that a step gives anyway."""
    return max(0, min(sequence.speculate, sequence.params.max_tokens - sequence.num_generated - 1))


def pending_states(sequence: Sequence) -> Tensor:
    """The h that wait for the MTP layer, [n, D]."""
    assert sequence.pending_hidden is not None, sequence.name
    return sequence.pending_hidden


def draft_tokens(engine: Engine, sequences: Seq[Sequence], max_drafts: int) -> list[list[int]]:
    """The drafts of each sequence, sampled as the target will sample at their positions; none where it cannot draft.

    MTP's slots up to the last known token become final for those that draft; further ones hold guesses.
    """
    num_drafts = [min(max_drafts, _num_drafts(engine, sequence)) for sequence in sequences]
    drafts: list[list[int]] = [[] for _ in sequences]
    active = [row for row, count in enumerate(num_drafts) if count]
    if not active:
        return drafts
    hidden_SD, logits_SZ = _run_pending(engine, [sequences[row] for row in active])
    depth = 0
    while True:
        positions = [sequences[row].num_tokens + depth for row in active]
        tokens = sample_rows(engine.ops, logits_SZ, [Place(sequences[row], drafts[row]) for row in active])
        for row, token in zip(active, tokens, strict=True):
            drafts[row].append(token)
        depth += 1
        going_on = [index for index, row in enumerate(active) if num_drafts[row] > depth]
        if not going_on:
            return drafts
        spans = [Span(sequence=sequences[active[index]], start=positions[index], count=1) for index in going_on]
        ids_S = torch.tensor([tokens[index] for index in going_on], device=engine.ops.device)
        hidden_SD, logits_SZ = _mtp_rows(engine, spans, ids_S, hidden_SD[going_on], num_last=len(spans))
        active = [active[index] for index in going_on]


def _num_drafts(engine: Engine, sequence: Sequence) -> int:
    if engine.mtp is None or not can_draft(sequence):
        return 0
    return max(0, min(num_wanted_drafts(sequence), engine.max_context_length - sequence.num_tokens - 1))


def catch_up(engine: Engine, sequences: Seq[Sequence], ended: Seq[Sequence]) -> None:
    """Turns waiting states of sequences that did not draft in this step into slots, all but the last of each; and of
    those that have ended, whose blocks then serve whoever goes on from them.

    One in `MANY_WAITING_STATES` of them at a step, and one more, those with most first: so no step has much to do, even
    if all have begun together, and no sequence comes to more than `MAX_WAITING_STATES`.
    """
    if engine.mtp is None:
        return
    many = [each for each in sequences if can_draft(each) and len(pending_states(each)) >= MANY_WAITING_STATES]
    many.sort(key=lambda each: len(pending_states(each)), reverse=True)
    at_once = 1 + len(sequences) // MANY_WAITING_STATES
    due = [
        each for place, each in enumerate(many)
        if place < at_once or len(pending_states(each)) >= MAX_WAITING_STATES
    ]
    names = {each.name for each in due}
    due += [each for each in ended if can_draft(each) and len(pending_states(each)) > 1 and each.name not in names]
    if due:
        _write_waiting(engine, due)


def let_go(sequences: Seq[Sequence]) -> None:
    """In place of `catch_up`, before a step: those with many waiting states give them up, and do not draft until they
    are computed again (`decode_worker.replays`)."""
    for sequence in sequences:
        if can_draft(sequence) and len(pending_states(sequence)) >= MANY_WAITING_STATES - 1:
            sequence.pending_hidden = last_hidden(sequence).clone()


def _write_waiting(engine: Engine, sequences: Seq[Sequence]) -> None:
    """The slots of all waiting states but the last, which goes on waiting: more than one of each."""
    assert engine.mtp is not None
    waiting = [pending_states(sequence) for sequence in sequences]
    spans = [
        Span(sequence=sequence, start=sequence.num_computed_mtp, count=len(states) - 1)
        for sequence, states in zip(sequences, waiting, strict=True)
    ]
    rows = build_step(spans, engine.layout.block_size, engine.ops.device).rows
    previous_TD = torch.cat([states[:-1] for states in waiting])
    engine.mtp.write_slots(token_ids(spans, engine.ops.device), previous_TD, rows, engine.mtp_cache)
    for sequence, states, span in zip(sequences, waiting, spans, strict=True):
        sequence.num_computed_mtp = span.end
        sequence.pending_hidden = states[-1:].clone()


def _run_pending(engine: Engine, sequences: Seq[Sequence]) -> tuple[Tensor, Tensor]:
    """MTP over all waiting states. Returns state [S, D] and logits [S, Z] of each sequence's last one."""
    waiting = [pending_states(sequence) for sequence in sequences]
    spans = [
        Span(sequence=sequence, start=sequence.num_computed_mtp, count=len(states) - 1)
        for sequence, states in zip(sequences, waiting, strict=True) if len(states) > 1
    ]
    spans += [Span(sequence=sequence, start=sequence.num_tokens - 1, count=1) for sequence in sequences]
    previous_TD = torch.cat([*(states[:-1] for states in waiting), *(states[-1:] for states in waiting)])
    last = _mtp_rows(
        engine, spans, token_ids(spans, engine.ops.device), previous_TD, num_last=len(sequences)
    )
    for sequence in sequences:
        sequence.num_computed_mtp = sequence.num_tokens
    return last


def _mtp_rows(
    engine: Engine, spans: Seq[Span], ids_T: Tensor, previous_TD: Tensor, *, num_last: int
) -> tuple[Tensor, Tensor]:
    """MTP's slots for the rows of the spans, states and logits of the last ones: these are valid until the next call,
    whose ops may reuse their room."""
    main, mtp, cache = engine.main, engine.mtp, engine.mtp_cache
    assert mtp is not None

    def run(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        hidden_SD = mtp.forward(tensors[0], tensors[1], StepRows(rows=rows), cache, num_last=num_last)
        return hidden_SD, main.logits(hidden_SD)

    step = build_step(spans, engine.layout.block_size, engine.ops.device)
    hidden_SD, logits_SZ = repeat(engine.ops, "mtp", run, (ids_T, previous_TD), step.rows, variant=num_last)
    return hidden_SD, logits_SZ
