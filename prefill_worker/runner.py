"""Runs prefill steps in the compute thread: chunks as planned, each component published as soon as it is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pd_engine.engine import Engine
from pd_engine.errors import DeadlineExceeded, Internal, PdRelayError
from pd_engine.priority import Turn
from pd_engine.sequence import SampledToken
from pd_engine.sequence import Sequence as Prompt
from pd_engine.service.identity import memory_of
from pd_engine.service.memory import audit_text
from pd_engine.service.wire import finish_names
from pd_engine.steps.forward import THE_MODEL, Steps
from pd_engine.steps.prefill import Chunk
from pd_engine.steps.prompt_queue import PromptQueue

log = logging.getLogger(__name__)

ANY_TURN = Turn()


class Publisher(Protocol):
    """One prompt's handoff as the compute thread sees it. Neither call blocks on the network."""

    def publish(self, component: int, num_valid_tokens: int) -> None:
        """The first `num_valid_tokens` slots of a component are final."""

    def finish(self, prompt: Prompt, first: SampledToken) -> None:
        """Everything is published and the first token sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstToken:
    """The end of one prompt: what was sampled, and whether it ends the choice (`wire.finish_names`)."""

    name: str
    token: SampledToken
    finish_reason: str
    stop_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step did.

    Attributes:
        progress: (name, tokens computed so far) of every prompt in it.
        first_tokens: of the prompts that are complete; the runner has forgotten them.
        failed: by name, of prompts that the step broke on, and of those whose deadline had passed before it; the
            runner has forgotten them too.
        num_tokens, seconds: its size and its duration.
    """

    progress: Sequence[tuple[str, int]]
    first_tokens: Sequence[FirstToken]
    failed: Mapping[str, PdRelayError]
    num_tokens: int
    seconds: float


class PrefillRunner:
    """The core of a prefill worker's compute thread. Every method runs in that thread.

    Args:
        chunk_tokens: prompt tokens a step at most.
        report: takes every step's report; called in the compute thread.
        steps: the ways into the model.
        clock: the worker's.
    """

    def __init__(
        self, engine: Engine, chunk_tokens: int, report: Callable[[StepReport], None], steps: Steps = THE_MODEL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._steps = steps
        self._chunk_tokens = chunk_tokens
        self._report = report
        self._clock = clock
        self._queue = PromptQueue()
        self._publishers: dict[str, Publisher] = {}

    def add(self, prompt: Prompt, publisher: Publisher | None, turn: Turn = ANY_TURN) -> None:
        """Takes a prompt whose blocks cover all its tokens; `publisher` None: nobody pulls it."""
        self._queue.add(prompt, turn)
        if publisher is not None:
            self._publishers[prompt.name] = publisher

    def drop(self, name: str) -> None:
        """Forgets a prompt, if it is still here: no later step writes to its blocks."""
        self._queue.drop(name)
        self._publishers.pop(name, None)

    def step(self) -> bool:
        failed = self._take_overdue()
        chunks = self._queue.plan(self._chunk_tokens)
        if not chunks and not failed:
            return False
        started_s = self._steps.clock()
        firsts: list[tuple[Prompt, SampledToken]] = []
        try:
            for prompt, outcome in self._compute(chunks) if chunks else []:
                if isinstance(outcome, Internal):
                    failed[prompt.name] = outcome
                else:
                    firsts.append((prompt, outcome))
        except Exception:
            log.exception("a prefill step failed: %s", [(chunk.sequence.name, chunk.num_tokens) for chunk in chunks])
            log.error("memory then: %s", audit_text(memory_of(self.engine, host_cache_bytes=0)))
            error = Internal("computing the prompt failed; the worker's log has the details")
            failed |= dict.fromkeys((chunk.sequence.name for chunk in chunks), error)
        self._report(_report_of(chunks, firsts, failed, self._steps.clock() - started_s))
        for prompt, first in firsts:  # after the report: the handoff may end before the next line
            if (publisher := self._publishers.get(prompt.name)) is not None:
                publisher.finish(prompt, first)
        for name in [*failed, *(prompt.name for prompt, _ in firsts)]:
            self.drop(name)
        return True

    def _take_overdue(self) -> dict[str, PdRelayError]:
        """Those whose deadline has passed: nothing more is computed of them."""
        overdue = self._queue.overdue(self._clock())
        for name in overdue:
            self.drop(name)
        return dict.fromkeys(overdue, DeadlineExceeded("the request's deadline passed before its first token"))

    def _compute(self, chunks: list[Chunk]) -> list[tuple[Prompt, SampledToken | Internal]]:
        valid_after = [
            (publisher, chunk.sequence.num_computed + chunk.num_tokens)
            for chunk in chunks
            if (publisher := self._publishers.get(chunk.sequence.name)) is not None
        ]

        def on_component(component: int) -> None:
            for publisher, num_valid_tokens in valid_after:
                publisher.publish(component, num_valid_tokens)

        self._steps.prefill(self.engine, chunks, on_component)
        complete = [chunk.sequence for chunk in chunks if chunk.sequence.num_computed == chunk.sequence.num_tokens]
        return list(zip(complete, self._steps.sample_first(self.engine, complete), strict=True)) if complete else []


def _report_of(
    chunks: list[Chunk], firsts: list[tuple[Prompt, SampledToken]], failed: dict[str, PdRelayError], seconds: float
) -> StepReport:
    first_tokens = []
    for prompt, token in firsts:
        finish_reason, stop_reason = finish_names(prompt)
        first_tokens.append(
            FirstToken(name=prompt.name, token=token, finish_reason=finish_reason, stop_reason=stop_reason)
        )
    return StepReport(
        progress=[(chunk.sequence.name, chunk.sequence.num_computed) for chunk in chunks],
        first_tokens=first_tokens,
        failed=failed,
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
        seconds=seconds,
    )
