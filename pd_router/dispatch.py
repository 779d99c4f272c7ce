"""Running requests: started once admitted, read chunk by chunk, ended by themselves, by an abort or by the client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pd_engine.errors import AlreadyExists, InvalidArgument, PdRelayError, Unavailable
from pd_engine.service.ids import NewId, random_id
from pd_engine.settings import Settings
from pd_engine.text.output import OutputText
from pd_engine.text.tokenizer import Tokenizer
from pd_router.admission import Admission, AdmissionLimits
from pd_router.gate import RoomGate
from pd_router.journey import Journey
from pd_router.metrics import Metrics
from pd_router.placement import Placement, Refusal, place
from pd_router.registry import Registry
from pd_router.request import Request, Submission
from pd_router.runner import JourneyRunner
from pd_router.running import RunningChoice, RunningRequest
from pd_router.stream import Chunk, TokenStream
from pd_router.wanted import PromptHashes, placement_request

log = logging.getLogger(__name__)

HANDOFF_MARGIN_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSettings:
    """What the settings file says of running requests. `speculate` is the server's default; `projected_tokens` as of
    the decode workers."""

    admission: AdmissionLimits
    max_attempts: int
    timeout_s: float
    handoff_wait_s: float
    recovery_wait_s: float
    ttft_target_ms: float | None
    itl_target_ms: float | None
    speculate: int
    projected_tokens: int

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
        )


class Dispatcher:
    def __init__(
        self, settings: DispatchSettings, *, registry: Registry, tokenizer: Tokenizer, metrics: Metrics,
        new_id: NewId = random_id,
    ) -> None:
        self._new_id = new_id
        self._settings = settings
        self._registry = registry
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._admission = Admission(settings.admission)
        self._gate = RoomGate(registry, self._admission)
        self._running: dict[str, RunningRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    @property
    def num_running(self) -> int:
        """Choices that have not ended."""
        return len(self._tasks)

    def admit(self, num_choices: int = 1) -> None:
        """To be asked before work is spent on a request.

        Raises:
            InvalidArgument: it has more choices than may ever run.
            ResourceExhausted: too many run; with a retry hint.
            Unavailable: the router is stopping, or a pool has no worker.
        """
        if self._draining:
            raise _stopping()
        max_running = self._settings.admission.max_running
        if num_choices > max_running:
            raise InvalidArgument(
                f"the request has {num_choices} choices; at most {max_running} run at once here"
            )
        self._admission.admit(self.num_running, num_choices)

    @contextlib.asynccontextmanager
    async def run(self, submission: Submission) -> AsyncIterator[RunningRequest]:
        """A started request; leaving the block before its end cancels it.

        Raises:
            AlreadyExists: a request with this id is running.
            InvalidArgument, ResourceExhausted, Unavailable: as `admit`.
        """
        running = self._start(submission)
        try:
            yield running
        finally:
            running.cancel()

    async def explain(self, request: Request) -> Placement | Refusal:
        """Where it would be placed now. Nothing is started or reserved."""
        block_hashes = await PromptHashes(request).of(self._registry.identity)
        wanted = placement_request(
            request,
            num_emitted=0,
            speculate=self._speculate(request),
            projected_tokens=self._settings.projected_tokens,
            block_size=self._registry.block_size,
            block_hashes=block_hashes,
        )
        return place(wanted, self._registry.snapshot(block_hashes))

    def abort(self, request_id: str) -> bool:
        """Ends a running request with finish reason "cancelled". False: none has that id."""
        running = self._running.get(request_id)
        if running is not None:
            running.cancel()
        return running is not None

    async def stop(self, drain_s: float) -> None:
        """Takes nothing new, lets running requests end for `drain_s`, then fails them: a client must not take what
        it has by then for an answer."""
        self._draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=drain_s)
        for running in list(self._running.values()):
            running.fail(_stopping())
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, submission: Submission) -> RunningRequest:
        self.admit(len(submission.choices))
        if submission.request_id in self._running:
            raise AlreadyExists(f"a request with id {submission.request_id!r} is running")
        running = RunningRequest(submission, [self._new_choice(request) for request in submission.choices])
        self._running[submission.request_id] = running
        for choice in running.choices:
            self._start_choice(running, choice)
        return running

    def _new_choice(self, request: Request) -> RunningChoice:
        stream = TokenStream(
            text=OutputText(self._tokenizer, request.params.stop, min_tokens=request.params.min_tokens),
            ending_ids=request.ending_ids,
            max_tokens=request.params.max_tokens,
        )
        journey = Journey(self._new_id(), stream, max_attempts=self._settings.max_attempts)
        return RunningChoice(request, journey)

    def _start_choice(self, running: RunningRequest, choice: RunningChoice) -> None:
        now_s = asyncio.get_running_loop().time
        begun_s = now_s()

        def emit(chunk: Chunk) -> None:
            if chunk.index == 0:
                self._metrics.note_first_token(now_s() - begun_s)
            running.wake()

        runner = JourneyRunner(
            choice.request,
            choice.journey,
            registry=self._registry,
            gate=self._gate,
            speculate=self._speculate(choice.request),
            projected_tokens=self._settings.projected_tokens,
            emit=emit,
            timeout_s=self._settings.timeout_s,
            handoff_wait_s=self._settings.handoff_wait_s,
            recovery_wait_s=self._settings.recovery_wait_s,
            ttft_target_ms=self._settings.ttft_target_ms,
            itl_target_ms=self._settings.itl_target_ms,
        )
        choice.task = asyncio.create_task(runner.run(), name=f"journey {choice.journey.journey_id}")
        self._tasks.add(choice.task)
        choice.task.add_done_callback(lambda task: self._ended(task, running, choice, now_s() - begun_s))

    def _speculate(self, request: Request) -> int:
        """Draft tokens a step."""
        wanted = request.params.speculate
        return min(self._settings.speculate if wanted is None else wanted, self._registry.max_speculate)

    def _ended(self, task: asyncio.Task[None], running: RunningRequest, choice: RunningChoice, seconds: float) -> None:
        request, journey = choice.request, choice.journey
        self._tasks.discard(task)
        if running.ended and self._running.get(request.request_id) is running:
            del self._running[request.request_id]
        self._admission.note_end(seconds * 1000)
        self._metrics.note_end(journey, num_prompt_tokens=len(request.prompt_ids), seconds=seconds)
        running.wake()
        log.info(
            "request %s, choice %d, journey %s: %s after %d attempts, %d + %d tokens, %.1f ms%s",
            request.request_id,
            request.choice,
            journey.journey_id,
            journey.state.value,
            journey.attempt,
            len(request.prompt_ids),
            len(journey.stream.tokens),
            seconds * 1000,
            _why(journey.error),
        )


def _stopping() -> Unavailable:
    return Unavailable("this router is stopping")


def _why(error: PdRelayError | None) -> str:
    return f": {error.message}" if error is not None else ""
