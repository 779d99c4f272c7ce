"""Runs decode steps in the compute thread: one after the other while there are sequences, and moves between them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from decode_worker.host_tier import MOVE_BYTES, Mover, Stored
from decode_worker.itl_budget import ItlBudget
from decode_worker.local_prefill import LocalPrompts, PromptReport
from decode_worker.replays import Replays
from decode_worker.scheduler import Batch, Place
from pd_engine.engine import Engine
from pd_engine.errors import Internal, PdRelayError
from pd_engine.priority import Turn
from pd_engine.sampling.params import MAX_SPECULATE
from pd_engine.sequence import SampledToken
from pd_engine.sequence import Sequence as Choice
from pd_engine.service.identity import memory_of
from pd_engine.service.memory import audit_text
from pd_engine.service.wire import finish_names
from pd_engine.steps.decode import DecodeOutput, num_slots_needed
from pd_engine.steps.draft import let_go
from pd_engine.steps.forward import THE_MODEL, Steps
from pd_engine.steps.speculation import SpeculationPolicy

log = logging.getLogger(__name__)

NOTHING = PromptReport()


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a step gave one sequence.

    Attributes:
        num_final_mtp: leading positions whose MTP slots are final.
        drafted, accepted: totals of the sequence.
        finish_reason, stop_reason: empty while it goes on; else the runner has forgotten it.
    """

    name: str
    tokens: Sequence[SampledToken]
    num_final_mtp: int
    drafted: int
    accepted: int
    finish_reason: str
    stop_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step did, and the moves before it.

    Attributes:
        moved_out: sequences that are in host memory now; the runner has forgotten them.
        moved_back: names of those that are in the batch again.
        failed: by name, of sequences that the step or the move broke on; the runner has forgotten them.
        num_running: in the batch, after the step.
        seconds: duration of the decode step, and of what was computed again before it.
        prompts: what was done of prompts beside it.
    """

    moved_out: Sequence[Stored]
    moved_back: Sequence[str]
    progress: Sequence[Progress]
    failed: Mapping[str, PdRelayError]
    num_running: int
    seconds: float
    prompts: PromptReport = NOTHING


class DecodeRunner:
    """The core of a decode worker's compute thread. Every method runs in that thread.

    Args:
        report: takes every step's report; called in the compute thread.
        policy: how many drafts a step makes at most; None: as many as its sequences would like.
        move_bytes: that are copied between two steps at most.
        steps: the ways into the model.
        clock: the worker's.
        budget: of a decode step and a chunk of a prompt beside it; None: the usual one.
    """

    def __init__(
        self, engine: Engine, max_batch: int, report: Callable[[StepReport], None],
        policy: SpeculationPolicy | None = None, move_bytes: int = MOVE_BYTES,
        steps: Steps = THE_MODEL, clock: Callable[[], float] = time.monotonic, budget: ItlBudget | None = None,
    ) -> None:
        self.engine = engine
        self._steps = steps
        self._policy = policy
        self._batch = Batch(max_batch)
        self._mover = Mover(engine.arena, move_bytes)
        self._report = report
        self._clock = clock
        budget = budget or ItlBudget()
        self._prompts = LocalPrompts(engine, steps, budget, clock)
        self._replays = Replays(engine, steps, budget)
        self._decode_s = 0.0
        self._sequences: dict[str, Choice] = {}
        self._places: dict[str, Place] = {}

    def add(self, sequence: Choice, place: Place) -> None:
        """Takes a sequence whose prompt is computed and whose first token is known. It is in every step that its blocks
        have room for.

        Args:
            place: among all; it is in no step from its deadline on.
        """
        assert sequence.name not in self._sequences, sequence.name
        self._sequences[sequence.name] = sequence
        self._places[sequence.name] = place
        self._batch.join(sequence.name, place)

    def add_prompt(self, prompt: Choice, turn: Turn, *, with_checksums: bool) -> None:
        """Takes a prompt to compute, whose blocks cover all its tokens. When it is reported complete it is not here any
        more: `add` it."""
        self._prompts.add(prompt, turn, with_checksums=with_checksums)

    def grant(self, name: str, block_ids: Sequence[int]) -> None:
        """More blocks for a sequence, if it is still here."""
        if (sequence := self._sequences.get(name)) is not None:
            sequence.block_ids = [*sequence.block_ids, *block_ids]

    def move_out(self, name: str) -> None:
        """Begins to move a sequence to host memory, if it is still here."""
        if (sequence := self._sequences.get(name)) is not None:
            place = self._places[name]
            self._forget(name)
            self._mover.move_out(sequence, place)

    def bring_back(self, stored: Stored, block_ids: Sequence[int], num_held: int) -> None:
        """Begins to move a sequence into these blocks; the first `num_held` have its latents already."""
        self._mover.bring_back(stored, block_ids, num_held)

    def drop(self, name: str) -> int | None:
        """Forgets a sequence, if it is still here: no later step writes to its blocks.

        Returns:
            Of one that was being decoded, leading positions whose MTP slots are final: as at an end of its own, none
            that could be is missing.
        """
        sequence = self._sequences.get(name)
        self._forget(name)
        self._prompts.drop(name)
        self._mover.drop(name)
        if sequence is None:
            return None
        try:
            self._steps.catch_up(self.engine, [], [sequence])
        except Exception:  # these slots are for later requests; nothing of this one is lost without them
            log.exception("MTP slots of %s could not be written", name)
            return None
        return sequence.num_computed_mtp

    def step(self) -> bool:
        moves = self._mover.advance()
        for stored in moves.back:
            self.add(stored.sequence, stored.place)
        sequences = [self._sequences[name] for name in self._batch.next_step(self._is_ready)]
        started_s = self._steps.clock()
        progress, failed = self._try_decode(sequences) if sequences else ([], {})
        seconds = self._steps.clock() - started_s
        prompts = self._prompts.advance(seconds if sequences else None)
        if prompts.is_empty and not (sequences or moves.out or moves.back or moves.failed):
            return self._mover.is_busy
        for name in [*failed, *(item.name for item in progress if item.finish_reason)]:
            self._forget(name)
        self._report(
            StepReport(
                moved_out=moves.out, moved_back=[stored.sequence.name for stored in moves.back], progress=progress,
                failed={**moves.failed, **failed}, num_running=self._batch.num_running, seconds=seconds,
                prompts=prompts,
            )
        )
        return True

    def _forget(self, name: str) -> None:
        if self._sequences.pop(name, None) is not None:
            del self._places[name]
            self._batch.leave([name])

    def _is_ready(self, name: str) -> bool:
        """Whether its blocks have room for a step (else more have been asked for) and it is not overdue."""
        if self._places[name].is_overdue(self._clock()):
            return False
        sequence = self._sequences[name]
        return num_slots_needed(sequence) <= len(sequence.block_ids) * self.engine.layout.block_size

    def _try_decode(self, sequences: list[Choice]) -> tuple[list[Progress], dict[str, Internal]]:
        progress: list[Progress] = []
        failed: dict[str, Internal] = {}
        try:
            for sequence, outcome in zip(sequences, self._decode(sequences), strict=True):
                if isinstance(outcome, Internal):
                    failed[sequence.name] = outcome
                else:
                    progress.append(_progress(sequence, outcome))
        except Exception:
            log.exception("a decode step failed: %s", [sequence.name for sequence in sequences])
            with contextlib.suppress(OSError):  # no file may be opened any more
                log.error("memory then: %s", audit_text(memory_of(self.engine, host_cache_bytes=0)))
            return [], dict.fromkeys(
                (sequence.name for sequence in sequences),
                Internal("a decode step failed; the worker's log has the details"),
            )
        return progress, failed

    def _decode(self, sequences: list[Choice]) -> list[DecodeOutput | Internal]:
        if self._policy is None:
            return self._steps.decode(self.engine, sequences, MAX_SPECULATE)
        if self._policy.is_futile:
            let_go(sequences)
        elif self._policy.pays(len(sequences)) and self._prompts.is_empty:
            self._replays.advance(sequences, self._decode_s)
        max_drafts = self._policy.choose(len(sequences))
        started_s = self._steps.clock()
        outcomes = self._steps.decode(self.engine, sequences, max_drafts)
        self._decode_s = self._steps.clock() - started_s
        outputs = [outcome for outcome in outcomes if isinstance(outcome, DecodeOutput)]
        if outputs:
            self._policy.record(
                len(sequences), self._decode_s, [output.num_drafted for output in outputs],
                [output.num_accepted for output in outputs],
            )
        return outcomes


def _progress(sequence: Choice, output: DecodeOutput) -> Progress:
    finish_reason, stop_reason = finish_names(sequence)
    assert bool(finish_reason) == (output.finish_reason is not None), (sequence.name, output.finish_reason)
    return Progress(
        name=sequence.name,
        tokens=output.tokens,
        num_final_mtp=sequence.num_computed_mtp,
        drafted=sequence.num_drafted,
        accepted=sequence.num_accepted,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
