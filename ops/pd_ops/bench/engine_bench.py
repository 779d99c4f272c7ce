"""Runs `bench engine`: our engine and its peers, each loaded in a process of its own, take turns in every round."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from pd_engine.errors import Unavailable
from pd_ops.bench.child import Child
from pd_ops.bench.engine_rows import (
    Clock,
    Comparison,
    Kind,
    Row,
    Sample,
    StepRow,
    prompts_of,
    row,
    step_row,
)
from pd_ops.bench.measured_process import Document
from pd_ops.bench.peers import Peer
from pd_ops.bench.speculation_rows import SpeculationRow, speculation_row

GREEDY_PROMPT = tuple(range(10, 26))
GREEDY_TOKENS = 24
CACHE_MIB = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """What to measure, of every model and dtype.

    Attributes:
        rounds: turns of every implementation in every case.
        min_s: CPU seconds of one turn at least.
        speculate: drafts a step to measure, the least first; those need an MTP layer.
    """

    comparisons: tuple[Comparison, ...]
    rounds: int
    min_s: float
    threads: int
    ops: str
    temperature: float
    clock: Clock
    speculate: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class BenchResult:
    """What has been measured so far; complete unless the run was interrupted.

    Attributes:
        engines: what each of our processes said of itself, and how far its peers' greedy tokens agree with its own.
        failures: peers that failed, and where.
    """

    rows: list[Row] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    speculation: list[SpeculationRow] = field(default_factory=list)
    engines: list[Document] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One model in one dtype. `work_directory`: where a peer may keep a converted copy of it."""

    name: str
    path: Path
    dtype: str
    work_directory: Path


class EngineBench:
    """Args:
    note: takes a line of progress.
    """

    def __init__(
        self, plan: BenchPlan, peers: Sequence[Peer], result: BenchResult, note: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._peers = peers
        self._result = result
        self._note = note

    def run(self, subject: Subject) -> None:
        """All cases of one model and dtype; rows are added as they are known.

        Raises:
            Unavailable: our own process failed.
        """
        with ExitStack() as stack:
            ours = stack.enter_context(closing(self._own_child(subject)))
            self._note(f"{subject.name} {subject.dtype}: loading pd-relay")
            about = ours.ready()
            engine: Document = {"model": subject.name, "dtype": subject.dtype, **about, "peers": []}
            self._result.engines.append(engine)
            peers = self._load_peers(subject, stack, ours, engine)
            for comparison in self._plan.comparisons:
                if (reason := _too_large(comparison, max(self._plan.speculate), about)) is not None:
                    self._note(f"{subject.name} {subject.dtype}: {comparison.text} left out: {reason}")
                    continue
                self._measure(subject, comparison, ours, peers, about)

    def _own_child(self, subject: Subject) -> Child:
        options = json.dumps(script_options(subject, self._plan))
        command = [sys.executable, "-m", "pd_ops.bench.engine_process", options]
        return Child("pd-relay", command, threads=self._plan.threads)

    def _load_peers(self, subject: Subject, stack: ExitStack, ours: Child, engine: Document) -> list[Child]:
        """One after the other, so that none disturbs the other's choices; those that fail are left out."""
        expected = ours.ask(_greedy_request())["token_ids"]
        loaded = []
        for peer in self._peers:
            self._note(f"{subject.name} {subject.dtype}: loading {peer.name}")
            options = json.dumps(script_options(subject, self._plan))
            command = [str(peer.python), str(peer.script), options]
            child = stack.enter_context(closing(Child(peer.name, command, threads=self._plan.threads)))
            try:
                about = child.ready()
                got = child.ask(_greedy_request())["token_ids"]
            except Unavailable as error:
                self._fail(f"{subject.name} {subject.dtype}: {error.message}")
                continue
            engine["peers"].append({**about, "same_greedy_tokens": num_equal(expected, got), "of": GREEDY_TOKENS})
            loaded.append(child)
        return loaded

    def _measure(
        self, subject: Subject, comparison: Comparison, ours: Child, peers: Sequence[Child], about: Document
    ) -> None:
        """All rounds of one case. A peer that fails in it is left out of its rows."""
        drafts = [count for count in self._plan.speculate if count == 0 or about["has_mtp"]]
        speculations = drafts if comparison.kind is Kind.DECODE else [0]
        turns = [(ours, speculate) for speculate in speculations] + [(peer, 0) for peer in peers]
        samples: dict[tuple[str, int], list[Sample]] = {(child.name, speculate): [] for child, speculate in turns}
        for number in range(self._plan.rounds):
            self._note(f"{subject.name} {subject.dtype}: {comparison.text}, round {number + 1} of {self._plan.rounds}")
            prompts = prompts_of(comparison, about["vocab_size"], number)
            shift = number % len(turns)
            for child, speculate in turns[shift:] + turns[:shift]:
                if (child.name, speculate) not in samples:
                    continue
                try:
                    answer = child.ask(_request(comparison, prompts, speculate, self._plan.min_s))
                except Unavailable as error:
                    if child is ours:
                        raise
                    self._fail(f"{subject.name} {subject.dtype}, {comparison.text}: {error.message}")
                    del samples[child.name, speculate]
                    continue
                samples[child.name, speculate].append(Sample.parse(answer))
        self._add_rows(subject, comparison, ours, peers, speculations, samples)

    def _add_rows(
        self, subject: Subject, comparison: Comparison, ours: Child, peers: Sequence[Child],
        speculations: Sequence[int], samples: dict[tuple[str, int], list[Sample]],
    ) -> None:
        measured: list[str | None] = [peer.name for peer in peers if (peer.name, 0) in samples]
        for speculate in speculations:
            mine = samples[ours.name, speculate]
            for peer in measured or [None]:
                theirs = [] if peer is None else samples[peer, 0]
                self._result.rows.append(row(
                    comparison, mine, peer, theirs, model=subject.name, dtype=subject.dtype, speculate=speculate,
                    clock=self._plan.clock,
                ))
            if comparison.kind is Kind.DECODE:
                self._result.steps.append(step_row(
                    mine, model=subject.name, dtype=subject.dtype, batch=comparison.batch, speculate=speculate
                ))
            if speculate and (ours.name, 0) in samples:
                drafts = speculation_row(
                    mine, samples[ours.name, 0], model=subject.name, dtype=subject.dtype, batch=comparison.batch,
                    speculate=speculate, clock=self._plan.clock,
                )
                self._result.speculation += [] if drafts is None else [drafts]

    def _fail(self, text: str) -> None:
        self._result.failures.append(text)
        self._note(f"failed: {text}")


def script_options(subject: Subject, plan: BenchPlan) -> Document:
    """What a measured process is told, ours and peers' alike."""
    longest = max(comparison.max_length(max(plan.speculate)) for comparison in plan.comparisons)
    return {
        "model": str(subject.path), "dtype": subject.dtype, "threads": plan.threads, "ops": plan.ops,
        "cache_mib": CACHE_MIB, "temperature": plan.temperature, "work_directory": str(subject.work_directory),
        "max_length": longest, "max_batch": max(comparison.batch for comparison in plan.comparisons),
        "converter_python": sys.executable,
    }


def num_equal(expected: Sequence[int], got: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    count = 0
    for mine, other in zip(expected, got, strict=False):
        if mine != other:
            break
        count += 1
    return count


def _too_large(comparison: Comparison, max_drafts: int, about: Document) -> str | None:
    length = comparison.max_length(max_drafts)
    if length > about["max_context_length"]:
        return f"the model's context is {about['max_context_length']} tokens"
    if comparison.batch * length > about["num_slots"]:
        return f"the cache holds {about['num_slots']} tokens"
    return None


def _request(comparison: Comparison, prompts: list[list[int]], speculate: int, min_s: float) -> Document:
    return {
        "call": "measure", "case": comparison.kind.value, "prompts": prompts, "num_steps": comparison.num_steps,
        "speculate": speculate, "min_s": min_s,
    }


def _greedy_request() -> Document:
    return {"call": "greedy", "prompt": list(GREEDY_PROMPT), "num_tokens": GREEDY_TOKENS}
