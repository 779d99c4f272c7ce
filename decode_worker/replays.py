"""States that sequences gave up (`pd_engine.steps.draft.let_go`) are computed again where drafts have come to pay.

The tokens since then pass the model once more, some at a time: they leave the bits that are there already, and MTP's
slots.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

from decode_worker.itl_budget import ItlBudget
from pd_engine.engine import Engine
from pd_engine.sequence import Sequence
from pd_engine.steps.forward import Steps
from pd_engine.steps.prefill import Chunk
from pd_engine.steps.state import can_draft

log = logging.getLogger(__name__)

WORTH_TOKENS = 4  # still to come, for each that is computed again: it costs up to a step, drafts save a quarter of one


def is_worth_it(sequence: Sequence) -> bool:
    """Whether a sequence that has begun lacks states, and has enough before it to want them back."""
    if not sequence.speculate or can_draft(sequence):
        return False
    num_missing = sequence.num_computed - sequence.num_computed_mtp
    return sequence.params.max_tokens - sequence.num_generated >= WORTH_TOKENS * num_missing


class Replays:
    """Belongs to the compute thread.

    Args:
        budget: says how many tokens at a time, as of a prompt.
    """

    def __init__(self, engine: Engine, steps: Steps, budget: ItlBudget) -> None:
        self._engine = engine
        self._steps = steps
        self._budget = budget

    def advance(self, sequences: Seq[Sequence], decode_s: float) -> None:
        """A chunk of the first of these that wants one, if there is time for it. Its last chunk makes it able to draft.

        Args:
            decode_s: what the last decode step took.
        """
        due = next((sequence for sequence in sequences if is_worth_it(sequence)), None)
        if due is None or not (num_tokens := self._budget.chunk_tokens(decode_s)):
            return
        # As after a hit on blocks without MTP slots: the h of the last position that has one comes first.
        again = replace(due, num_computed=max(0, due.num_computed_mtp - 1), pending_hidden=None, processor=None)
        num_tokens = min(max(2, num_tokens), due.num_computed - again.num_computed)
        started_s = self._steps.clock()
        try:
            self._steps.prefill(self._engine, [Chunk(sequence=again, num_tokens=num_tokens)], lambda component: None)
        except Exception:  # without it this one makes no drafts; its tokens and those of others are the same
            log.exception("tokens of %s could not be computed again for drafts", due.name)
            due.speculate = 0
            return
        self._budget.note_chunk(num_tokens, self._steps.clock() - started_s)
        due.num_computed_mtp = again.num_computed_mtp
