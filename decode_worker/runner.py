"""Runs decode steps in the compute thread: one after the other while there are sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from decode_worker.scheduler import Batch
from pd_engine.engine import Engine
from pd_engine.errors import Internal
from pd_engine.sequence import SampledToken
from pd_engine.sequence import Sequence as Choice
from pd_engine.service.wire import finish_names
from pd_engine.steps.decode import DecodeOutput, num_slots_needed, try_decode_step
from pd_engine.steps.speculation import SpeculationPolicy

log = logging.getLogger(__name__)


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
    """What one step did.

    Attributes:
        failed: by name, of sequences that the step broke on; the runner has forgotten them.
        num_running: in the batch, after the step.
        seconds: its duration.
    """

    progress: Sequence[Progress]
    failed: Mapping[str, Internal]
    num_running: int
    seconds: float


class DecodeRunner:
    """The core of a decode worker's compute thread. Every method runs in that thread.

    Args:
        report: takes every step's report; called in the compute thread.
        policy: how many drafts a step makes at most; None: as many as its sequences would like.
    """

    def __init__(
        self, engine: Engine, max_batch: int, report: Callable[[StepReport], None],
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self.engine = engine
        self._policy = policy
        self._batch = Batch(max_batch)
        self._report = report
        self._sequences: dict[str, Choice] = {}

    def add(self, sequence: Choice) -> None:
        """Takes a sequence whose prompt is computed and whose first token is known; blocks cover its whole length."""
        assert sequence.name not in self._sequences, sequence.name
        self._sequences[sequence.name] = sequence
        self._batch.join(sequence.name)

    def drop(self, name: str) -> None:
        """Forgets a sequence, if it is still here: no later step writes to its blocks."""
        if self._sequences.pop(name, None) is not None:
            self._batch.leave([name])

    def step(self) -> bool:
        sequences = [self._sequences[name] for name in self._batch.next_step()]
        if not sequences:
            return False
        started_s = time.perf_counter()
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
            progress = []
            failed = dict.fromkeys(
                (sequence.name for sequence in sequences),
                Internal("a decode step failed; the worker's log has the details"),
            )
        seconds = time.perf_counter() - started_s
        for name in [*failed, *(item.name for item in progress if item.finish_reason)]:
            self.drop(name)
        self._report(
            StepReport(progress=progress, failed=failed, num_running=self._batch.num_running, seconds=seconds)
        )
        return True

    def _decode(self, sequences: list[Choice]) -> list[DecodeOutput | Internal]:
        block_size = self.engine.layout.block_size
        for sequence in sequences:
            assert num_slots_needed(sequence) <= len(sequence.block_ids) * block_size, sequence.name
        if self._policy is None:
            return try_decode_step(self.engine, sequences)
        max_drafts = self._policy.choose(len(sequences))
        started_s = time.perf_counter()
        outcomes = try_decode_step(self.engine, sequences, max_drafts)
        seconds = time.perf_counter() - started_s
        outputs = [outcome for outcome in outcomes if isinstance(outcome, DecodeOutput)]
        if outputs:
            self._policy.record(
                len(outputs), max_drafts, seconds, [output.num_drafted for output in outputs],
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
