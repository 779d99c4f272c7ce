"""A request on its way: its choices' journeys, whoever reads what comes of them, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pd_engine.errors import PdRelayError
from pd_engine.sequence import FinishReason, SampledToken
from pd_router.journey import HandoffReport, Journey, JourneyState
from pd_router.placement import Placement
from pd_router.request import Request, Submission
from pd_router.stream import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Everything about a choice that ended without an error. `stop_reason` as in `StreamEnd`; `placement` is the last
    one, if it was asked for."""

    request: Request
    tokens: tuple[SampledToken, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str
    num_cached_tokens: int
    num_accepted: int
    num_drafted: int
    handoff: HandoffReport | None
    placement: Placement | None


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of one choice: tokens, or its end, or both."""

    choice: int
    chunk: Chunk | None
    ended: bool


@dataclass(slots=True)
class RunningChoice:
    """`task` runs the journey; None before it has begun."""

    request: Request
    journey: Journey
    task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Everything that it held is released, too."""
        return self.task is not None and self.task.done()

    def result(self) -> Result:
        """After its end.

        Raises:
            PdRelayError: it was rejected or has failed.
        """
        journey = self.journey
        assert journey.ended, journey.state
        if journey.error is not None and journey.state is not JourneyState.CANCELLED:
            raise journey.error
        end = journey.stream.end
        held_text = "" if end is not None else journey.stream.finish_text()
        assert end is not None or journey.state is JourneyState.CANCELLED, (journey.state, held_text)
        return Result(
            request=self.request,
            tokens=tuple(journey.stream.tokens),
            text=journey.stream.text,
            finish_reason=end.finish_reason if end is not None else FinishReason.CANCELLED,
            stop_reason=end.stop_reason if end is not None else "",
            num_cached_tokens=journey.num_cached_tokens or 0,
            num_accepted=journey.num_accepted,
            num_drafted=journey.num_drafted,
            handoff=journey.handoff,
            placement=journey.placement,
        )


class RunningRequest:
    """Read `updates` to the end, or `cancel`; it is forgotten by itself."""

    def __init__(self, submission: Submission, choices: Sequence[RunningChoice]) -> None:
        self.submission = submission
        self.choices = tuple(choices)
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices)

    def wake(self) -> None:
        """Something is new."""
        self._news.set()

    async def updates(self) -> AsyncIterator[Update]:
        """Of each choice its tokens in order, then its end; what came while the reader was busy in one update."""
        num_read = [0] * len(self.choices)
        unended = list(range(len(self.choices)))
        while unended:
            await self._news.wait()
            self._news.clear()
            for number in list(unended):
                choice = self.choices[number]
                ended, chunk = choice.ended, choice.journey.stream.since(num_read[number])
                if chunk is not None:
                    num_read[number] += len(chunk.tokens)
                if ended:
                    unended.remove(number)
                if ended or chunk is not None:
                    yield Update(number, chunk, ended)

    def result(self, choice: int) -> Result:
        """After the choice's end.

        Raises:
            PdRelayError: it was rejected or has failed.
        """
        return self.choices[choice].result()

    def results(self) -> list[Result]:
        """Of all choices, after the last update.

        Raises:
            PdRelayError: one was rejected or has failed.
        """
        return [choice.result() for choice in self.choices]

    def cancel(self) -> None:
        """Ends it, unless it has ended; everything it holds anywhere is released."""
        for choice in self.choices:
            choice.journey.cancel()
        self._end()

    def fail(self, error: PdRelayError) -> None:
        """Ends it too; `result` raises the error."""
        for choice in self.choices:
            choice.journey.give_up(error)
        self._end()

    def _end(self) -> None:
        for choice in self.choices:
            if choice.task is not None:
                choice.task.cancel()
