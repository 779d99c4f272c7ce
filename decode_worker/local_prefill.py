"""Prompts that a decode worker computes itself: chunks of them beside its decode steps, in the compute thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from decode_worker.itl_budget import ItlBudget
from pd_engine.cache.checksums import slot_checksums
from pd_engine.engine import Engine
from pd_engine.errors import DeadlineExceeded, Internal, PdRelayError
from pd_engine.priority import Turn
from pd_engine.sequence import SampledToken
from pd_engine.sequence import Sequence as Choice
from pd_engine.service.wire import finish_names
from pd_engine.steps.forward import Steps
from pd_engine.steps.prefill import Chunk
from pd_engine.steps.prompt_queue import PromptQueue

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalFirst:
    """The end of one prompt.

    Attributes:
        sequence: to be decoded, unless it has ended.
        finish_reason, stop_reason: empty while it goes on (`wire.finish_names`).
        checksums: of the slots of all tokens that were computed (`slot_checksums`), if they were asked for.
    """

    sequence: Choice
    token: SampledToken
    finish_reason: str
    stop_reason: str
    checksums: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReport:
    """What was done of prompts beside one decode step.

    Attributes:
        progress: (name, tokens computed so far, of these with final MTP slots).
        firsts: of prompts that are complete.
        failed: by name, of those that broke or are overdue. These and complete ones are forgotten.
        num_tokens, seconds: of the chunk.
        was_busy: there was something to do, whether it was done or put off.
    """

    progress: Sequence[tuple[str, int, int]] = ()
    firsts: Sequence[LocalFirst] = ()
    failed: Mapping[str, PdRelayError] = field(default_factory=dict)
    num_tokens: int = 0
    seconds: float = 0.0
    was_busy: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.progress or self.failed)


class LocalPrompts:
    """Belongs to the compute thread.

    Args:
        budget: says how much is computed at a time.
        clock: the worker's, for deadlines.
    """

    def __init__(self, engine: Engine, steps: Steps, budget: ItlBudget, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._steps = steps
        self._budget = budget
        self._clock = clock
        self._queue = PromptQueue()
        self._with_checksums: set[str] = set()

    @property
    def is_empty(self) -> bool:
        return not len(self._queue)

    def add(self, prompt: Choice, turn: Turn, *, with_checksums: bool) -> None:
        """Takes a prompt whose blocks cover all its tokens."""
        self._queue.add(prompt, turn)
        if with_checksums:
            self._with_checksums.add(prompt.name)

    def drop(self, name: str) -> None:
        """Forgets a prompt, if it is still here: no later chunk writes to its blocks."""
        self._queue.drop(name)
        self._with_checksums.discard(name)

    def advance(self, decode_s: float | None) -> PromptReport:
        """Computes one chunk at most.

        Args:
            decode_s: what the decode step before it took; None: nothing was decoded.
        """
        failed = self._take_overdue()
        if not len(self._queue):
            return PromptReport(failed=failed, was_busy=bool(failed))
        num_tokens = self._budget.chunk_tokens(decode_s)
        if not num_tokens:
            return PromptReport(failed=failed, was_busy=True)
        chunks = self._queue.plan(num_tokens)
        started_s = self._steps.clock()
        firsts: list[LocalFirst] = []
        try:
            for sequence, outcome in self._compute(chunks):
                if isinstance(outcome, Internal):
                    failed[sequence.name] = outcome
                else:
                    firsts.append(self._first(sequence, outcome))
        except Exception:
            log.exception("a chunk failed: %s", [(chunk.sequence.name, chunk.num_tokens) for chunk in chunks])
            error = Internal("computing the prompt failed; the worker's log has the details")
            failed |= dict.fromkeys((chunk.sequence.name for chunk in chunks), error)
            firsts = []
        seconds = self._steps.clock() - started_s
        num_done = sum(chunk.num_tokens for chunk in chunks)
        if decode_s is not None:  # one that had the worker to itself says little of one that is small
            self._budget.note_chunk(num_done, seconds)
        for name in [*failed, *(first.sequence.name for first in firsts)]:
            self.drop(name)
        return PromptReport(
            progress=[(c.sequence.name, c.sequence.num_computed, c.sequence.num_computed_mtp) for c in chunks],
            firsts=firsts, failed=failed, num_tokens=num_done, seconds=seconds, was_busy=True,
        )

    def _take_overdue(self) -> dict[str, PdRelayError]:
        overdue = self._queue.overdue(self._clock())
        for name in overdue:
            self.drop(name)
        return dict.fromkeys(overdue, DeadlineExceeded("the request's deadline passed before its first token"))

    def _compute(self, chunks: list[Chunk]) -> list[tuple[Choice, SampledToken | Internal]]:
        self._steps.prefill(self._engine, chunks, lambda component: None)
        complete = [chunk.sequence for chunk in chunks if chunk.sequence.num_computed == chunk.sequence.num_tokens]
        return list(zip(complete, self._steps.sample_first(self._engine, complete), strict=True)) if complete else []

    def _first(self, sequence: Choice, token: SampledToken) -> LocalFirst:
        finish_reason, stop_reason = finish_names(sequence)
        checksums: Sequence[int] = ()
        if sequence.name in self._with_checksums:
            checksums = slot_checksums(
                self._engine.ops, self._engine.arena, sequence.block_ids, sequence.num_computed
            )
        return LocalFirst(
            sequence=sequence, token=token, finish_reason=finish_reason, stop_reason=stop_reason, checksums=checksums
        )
