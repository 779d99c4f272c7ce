"""Running requests: started once admitted, read chunk by chunk, ended by themselves, by an abort or by the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pd_engine.errors import InvalidArgument, Unavailable
from pd_engine.service.ids import NewId, random_id
from pd_engine.settings import Settings
from pd_engine.text.output import OutputText
from pd_engine.text.tokenizer import Tokenizer
from pd_router.admission import Admission, AdmissionLimits
from pd_router.callers import ANYONE, Caller, CallerLimits
from pd_router.choice_group import ChoiceGroup
from pd_router.gate import RoomGate
from pd_router.journey import Journey
from pd_router.known_requests import KnownRequests, RequestKey
from pd_router.metrics import Metrics
from pd_router.own_stages import Streaming, TimedText
from pd_router.placement import Placement, Refusal, place
from pd_router.registry import Registry
from pd_router.request import Request, Submission
from pd_router.request_log import log_end
from pd_router.runner import JourneyRunner
from pd_router.running import RunningChoice, RunningRequest
from pd_router.stream import Chunk, TokenStream
from pd_router.timeline import Timeline
from pd_router.trace_parent import TraceParent
from pd_router.tracing import Tracing
from pd_router.wanted import PromptHashes, placement_request

HANDOFF_MARGIN_S = 1.0
STOPPING_RETRY_MS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSettings:
    """What the settings file says of running requests. `speculate` is the server's default; `projected_tokens` as of
    the decode workers; `num_local_tokens` and `may_degrade` as of `PlacementRequest`."""

    admission: AdmissionLimits
    max_attempts: int
    timeout_s: float
    handoff_wait_s: float
    recovery_wait_s: float
    ttft_target_ms: float | None
    itl_target_ms: float | None
    speculate: int
    projected_tokens: int
    num_local_tokens: int
    may_degrade: bool
    request_keep_s: float
    max_kept_tokens: int
    resume_grace_s: float

    @staticmethod
    def of(settings: Settings) -> DispatchSettings:
        return DispatchSettings(
            admission=AdmissionLimits(
                max_running=settings.router.max_running_requests,
                max_waiting=settings.router.max_waiting_requests,
                max_queued_ms=settings.router.max_prefill_queue_ms,
            ),
            max_attempts=settings.router.max_attempts,
            timeout_s=settings.router.request_timeout_ms / 1000,
            handoff_wait_s=settings.transfer.lease_ms / 1000 + HANDOFF_MARGIN_S,
            recovery_wait_s=settings.router.recovery_wait_ms / 1000,
            ttft_target_ms=settings.router.ttft_target_ms,
            itl_target_ms=settings.router.itl_target_ms,
            speculate=settings.decode.speculate,
            projected_tokens=settings.decode.projected_tokens,
            num_local_tokens=settings.router.local_prefill_tokens,
            may_degrade=settings.router.degraded == "local",
            request_keep_s=settings.router.request_keep_ms / 1000,
            max_kept_tokens=settings.router.max_kept_tokens,
            resume_grace_s=settings.router.resume_grace_ms / 1000,
        )


class Dispatcher:
    def __init__(
        self, settings: DispatchSettings, *, registry: Registry, tokenizer: Tokenizer, vocab_size: int,
        metrics: Metrics, tracing: Tracing, new_id: NewId = random_id,
    ) -> None:
        """`vocab_size`: of the model, which may have more than the tokenizer."""
        self._new_id = new_id
        self._settings = settings
        self._registry = registry
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._tracing = tracing
        self._admission = Admission(settings.admission)
        self._gate = RoomGate(registry, self._admission)
        self._known: KnownRequests[RunningRequest] = KnownRequests(
            keep_s=settings.request_keep_s, max_cost=settings.max_kept_tokens
        )
        self._limits = CallerLimits()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    @property
    def num_running(self) -> int:
        """Choices that have not ended."""
        return len(self._tasks)

    @property
    def num_waiting(self) -> int:
        """Of them, those that wait in line for a worker."""
        return len(self._admission.line)

    @property
    def is_stopping(self) -> bool:
        return self._draining

    def admit(self, caller: Caller, request_id: str) -> None:
        """To be asked before work is spent on a request. One that is known is let in.

        Raises:
            ResourceExhausted: too many run; with a retry hint.
            Unavailable: the router is stopping.
        """
        if self._known.get(RequestKey(caller.name, request_id), _now_s()) is None:
            self._admit(1)

    def _admit(self, num_choices: int) -> None:
        if self._draining:
            raise _stopping()
        max_running = self._settings.admission.max_running
        if num_choices > max_running:
            raise InvalidArgument(
                f"the request has {num_choices} choices; at most {max_running} run at once here"
            )
        self._admission.admit(self.num_running, num_choices)

    @contextlib.asynccontextmanager
    async def run(
        self, submission: Submission, caller: Caller = ANYONE, trace_parent: TraceParent | None = None
    ) -> AsyncIterator[RunningRequest]:
        """The request, started, or found if its client has sent it before. When the last reader leaves this block
        before its end, it is cancelled; one that was to be resumable, after a while.

        Raises:
            AlreadyExists: the id stands for another request.
            InvalidArgument: it has more choices than may ever run.
            ResourceExhausted, Unavailable: as `admit`.
        """
        key = RequestKey(caller.name, submission.request_id)
        running = self._known.find(key, submission.payload, _now_s())
        if running is None:
            running = self._start(submission, key, caller, trace_parent)
        self._enter(running, submission)
        try:
            yield running
        finally:
            self._leave(running, key)

    async def explain(self, request: Request) -> Placement | Refusal:
        """Where it would be placed now. Nothing is started or reserved."""
        block_hashes = await PromptHashes(request).of(self._registry.identity)
        wanted = placement_request(
            request,
            num_emitted=0,
            speculate=self._speculate(request),
            projected_tokens=self._settings.projected_tokens,
            num_local_tokens=self._settings.num_local_tokens,
            may_degrade=self._settings.may_degrade,
            block_size=self._registry.block_size,
            block_hashes=block_hashes,
        )
        return place(wanted, self._registry.snapshot(block_hashes))

    def abort(self, request_id: str, caller: Caller = ANYONE) -> bool:
        """Ends a caller's running request with finish reason "cancelled". False: none has that id."""
        key = RequestKey(caller.name, request_id)
        running = self._known.get(key, _now_s())
        if running is None or running.ended:
            return False
        self._cancel(running, key)
        return True

    async def stop(self, drain_s: float) -> None:
        """Takes nothing new, lets running requests end for `drain_s`, then fails them: a client must not take what
        it has by then for an answer."""
        self._draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=drain_s)
        for running in self._known.running():
            running.fail(_stopping())
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enter(self, running: RunningRequest, submission: Submission) -> None:
        running.num_readers += 1
        running.resumable |= submission.resumable
        if running.grace is not None:
            running.grace.cancel()
            running.grace = None

    def _leave(self, running: RunningRequest, key: RequestKey) -> None:
        running.num_readers -= 1
        if running.num_readers or running.ended:
            return
        if running.resumable:
            loop = asyncio.get_running_loop()
            running.grace = loop.call_later(self._settings.resume_grace_s, self._cancel, running, key)
        else:
            self._cancel(running, key)

    def _cancel(self, running: RunningRequest, key: RequestKey) -> None:
        """Its id is free at once: who sends it again must not get what was cut off."""
        self._known.forget(key, running)
        running.cancel()

    def _start(
        self, submission: Submission, key: RequestKey, caller: Caller, trace_parent: TraceParent | None
    ) -> RunningRequest:
        self._admit(len(submission.choices))
        choices = [self._new_choice(request, submission) for request in submission.choices]
        num_prompt_tokens = sum(len(submission.choices[first].prompt_ids) for first in submission.firsts)
        num_prompt_tokens += sum(choice.journey.stream.num_replayed for choice in choices)
        self._limits.admit(
            caller, num_choices=len(submission.choices), num_prompt_tokens=num_prompt_tokens, now_s=_now_s()
        )
        running = RunningRequest(submission, caller, choices, trace_parent)
        self._known.add(key, submission.payload, running)
        self._metrics.own_stages.tokenize_s += submission.tokenize_s
        group = ChoiceGroup()
        for choice in running.choices:
            self._start_choice(running, choice, key, group)
        return running

    def _new_choice(self, request: Request, submission: Submission) -> RunningChoice:
        streaming = Streaming(self._metrics.own_stages)
        stream = self._new_stream(request, submission.replayed(request.choice), streaming)
        journey = Journey(self._new_id(), stream, max_attempts=self._settings.max_attempts)
        return RunningChoice(request, journey, streaming)

    def _new_stream(self, request: Request, replayed: Sequence[int], streaming: Streaming) -> TokenStream:
        """The last of what is replayed is generated again where the choice ends with it: so it ends as any other."""
        text = OutputText(self._tokenizer, request.params.stop, min_tokens=request.params.min_tokens)
        stream = TokenStream(
            text=TimedText(text, streaming),
            ending_ids=request.ending_ids,
            max_tokens=request.params.max_tokens,
        )
        return stream if stream.replay(replayed) else self._new_stream(request, replayed[:-1], streaming)

    def _start_choice(
        self, running: RunningRequest, choice: RunningChoice, key: RequestKey, group: ChoiceGroup
    ) -> None:
        now_s = asyncio.get_running_loop().time
        timeline = choice.timeline = Timeline(begun_s=now_s())

        def emit(chunk: Chunk) -> None:
            gap_s = timeline.note_tokens(now_s())
            if gap_s is None:
                self._metrics.note_first_token(timeline.first_token_s or 0.0, len(choice.request.prompt_ids))
            self._metrics.note_tokens(len(chunk.tokens), gap_s)
            running.wake()

        runner = JourneyRunner(
            choice.request,
            choice.journey,
            registry=self._registry,
            gate=self._gate,
            group=group,
            speculate=self._speculate(choice.request),
            projected_tokens=self._settings.projected_tokens,
            num_local_tokens=self._settings.num_local_tokens,
            may_degrade=self._settings.may_degrade,
            emit=emit,
            timeout_s=self._settings.timeout_s,
            handoff_wait_s=self._settings.handoff_wait_s,
            recovery_wait_s=self._settings.recovery_wait_s,
            ttft_target_ms=self._settings.ttft_target_ms,
            itl_target_ms=self._settings.itl_target_ms,
            timeline=timeline,
            vocab_size=self._vocab_size,
        )
        choice.task = asyncio.create_task(runner.run(), name=f"journey {choice.journey.journey_id}")
        self._tasks.add(choice.task)
        choice.task.add_done_callback(lambda task: self._ended(task, running, choice, key, now_s()))

    def _speculate(self, request: Request) -> int:
        """Draft tokens a step."""
        wanted = request.params.speculate
        return min(self._settings.speculate if wanted is None else wanted, self._registry.max_speculate)

    def _ended(
        self, task: asyncio.Task[None], running: RunningRequest, choice: RunningChoice, key: RequestKey, now_s: float
    ) -> None:
        request, journey = choice.request, choice.journey
        self._tasks.discard(task)
        num_generated = len(journey.stream.tokens) - journey.stream.num_replayed
        self._limits.note_end(running.caller, num_generated=num_generated, now_s=now_s)
        if running.ended:
            self._note_request_end(running, key)
        timeline = choice.timeline
        assert timeline is not None, "it has begun"
        timeline.ended_s = now_s
        self._admission.note_end((now_s - timeline.begun_s) * 1000)
        self._metrics.note_end(journey, timeline, num_prompt_tokens=len(request.prompt_ids))
        running.wake()
        self._tracing.note_end(running, choice, key)
        log_end(running, choice, seconds=now_s - timeline.begun_s)

    def _note_request_end(self, running: RunningRequest, key: RequestKey) -> None:
        if running.submission.payload and running.succeeded:
            self._known.keep(key, running, cost=running.num_tokens_kept, now_s=_now_s())
        else:
            self._known.forget(key, running)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _stopping() -> Unavailable:
    return Unavailable("this router is stopping", retry_after_ms=STOPPING_RETRY_MS)
