"""A request on its way: its choices' journeys, whoever reads what comes of them, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_engine.errors import InvalidArgument, PdRelayError
from pd_engine.sequence import FinishReason, SampledToken
from pd_router.callers import Caller
from pd_router.journey import HandoffReport, Journey, JourneyState, LocalPrefillReport
from pd_router.own_stages import Streaming
from pd_router.placement import Placement
from pd_router.request import Request, Submission
from pd_router.stream import Chunk
from pd_router.timeline import Timeline
from pd_router.trace_parent import TraceParent


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
    local_prefill: LocalPrefillReport | None
    placement: Placement | None


class Update(NamedTuple):
    """What is new of one choice: tokens, or its end, or both."""

    choice: int
    chunk: Chunk | None
    ended: bool


@dataclass(slots=True)
class RunningChoice:
    """`streaming`: what it takes to tell its reader. `task` runs the journey; None before it has begun. `timeline`: of
    that; None before."""

    request: Request
    journey: Journey
    streaming: Streaming
    task: asyncio.Task[None] | None = None
    timeline: Timeline | None = None

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
            num_cached_tokens=min(journey.num_cached_tokens or 0, len(self.request.prompt_ids)),
            num_accepted=journey.num_accepted,
            num_drafted=journey.num_drafted,
            handoff=journey.handoff,
            local_prefill=journey.local_prefill,
            placement=journey.placement,
        )


class RunningRequest:
    """Anyone may read it, with `updates` or a `Reader`; it is forgotten by itself."""

    def __init__(
        self, submission: Submission, caller: Caller, choices: Sequence[RunningChoice],
        trace_parent: TraceParent | None = None,
    ) -> None:
        self.submission = submission
        self.trace_parent = trace_parent
        self.caller = caller
        self.choices = tuple(choices)
        self.num_readers = 0
        self.resumable = False
        self.grace: asyncio.TimerHandle | None = None  # ends it, unless a reader comes first
        self._listeners: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices)

    @property
    def succeeded(self) -> bool:
        """All choices have ended by themselves."""
        return all(choice.ended and choice.journey.stream.end is not None for choice in self.choices)

    @property
    def num_tokens_kept(self) -> int:
        """Prompt and generated tokens, each of a generated one's logprobs counted as one."""
        num_prompt = sum(len(self.choices[first].request.prompt_ids) for first in self.submission.firsts)
        return num_prompt + sum(
            len(choice.journey.stream.tokens) * (1 + (choice.request.params.logprobs or 0)) for choice in self.choices
        )

    def listen(self, on_news: Callable[[], None]) -> None:
        """It is called whenever something is new, and must not raise; until `unlisten`."""
        self._listeners = [*self._listeners, on_news]

    def unlisten(self, on_news: Callable[[], None]) -> None:
        self._listeners = [listener for listener in self._listeners if listener != on_news]

    def wake(self) -> None:
        """Something is new."""
        for on_news in self._listeners:
            on_news()

    async def updates(self, submission: Submission) -> AsyncIterator[Update]:
        """Of each choice its tokens in order, then its end; what came while the reader was busy in one update.

        Args:
            submission: as it was sent this time: it says which tokens its client has.

        Raises:
            InvalidArgument: it has more than there are, or others.
        """
        reader = Reader(self, submission)
        news = asyncio.Event()
        self.listen(news.set)
        try:
            while not reader.ended:
                news.clear()
                while (update := reader.next()) is not None:
                    yield update
                if not reader.ended:
                    await news.wait()
        finally:
            self.unlisten(news.set)

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


class Reader:
    """What of a request its client has not been told yet.

    Args:
        submission: as it was sent this time: it says which tokens the client has.
    """

    def __init__(self, running: RunningRequest, submission: Submission) -> None:
        self._choices = running.choices
        self._num_read = list(submission.resume_from)
        self._unchecked = dict(enumerate(submission.resume_output_ids))
        self._unended = deque(range(len(running.choices)))  # whose turn it is first

    @property
    def ended(self) -> bool:
        """The end of every choice was told."""
        return not self._unended

    def next(self) -> Update | None:
        """All that is new of the next choice of which something is; None if nothing is.

        Raises:
            InvalidArgument: the client has more tokens than there are, or others.
        """
        for _ in range(len(self._unended)):
            number = self._unended[0]
            choice, num_read = self._choices[number], self._num_read[number]
            stream, has_ended = choice.journey.stream, choice.ended
            chunk = stream.since(num_read)
            if has_ended:
                if stream.end is not None and num_read > len(stream.tokens):
                    raise InvalidArgument(
                        f"resume_from is {num_read}, but choice {number} has {len(stream.tokens)} tokens"
                    )
                self._unended.popleft()
            else:
                self._unended.rotate(-1)
            if has_ended or chunk is not None:
                if number in self._unchecked:
                    self._check_same(number, self._unchecked.pop(number))
                if chunk is not None:
                    self._num_read[number] += len(chunk.tokens)
                return Update(number, chunk, has_ended)
        return None

    def _check_same(self, number: int, token_ids: Sequence[int]) -> None:
        known = self._choices[number].journey.stream.token_ids[: len(token_ids)]
        for index, (theirs, ours) in enumerate(zip(token_ids, known, strict=False)):
            if theirs != ours:
                raise InvalidArgument(
                    f"resume_output_ids have {theirs} at index {index} of choice {number}, where it has {ours}"
                )
