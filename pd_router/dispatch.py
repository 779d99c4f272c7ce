"""Running requests: started once admitted, read chunk by chunk, ended by themselves, by an abort or by the client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pd_engine.errors import AlreadyExists, PdRelayError, Unavailable
from pd_engine.sequence import FinishReason, SampledToken
from pd_engine.service.ids import NewId, random_id
from pd_engine.text.output import OutputText
from pd_engine.text.tokenizer import Tokenizer
from pd_router.admission import Admission
from pd_router.gate import RoomGate
from pd_router.journey import HandoffReport, Journey, JourneyState
from pd_router.metrics import Metrics
from pd_router.placement import Placement, Refusal, place
from pd_router.registry import Registry
from pd_router.request import Request
from pd_router.runner import JourneyRunner
from pd_router.stream import Chunk, TokenStream
from pd_router.wanted import PromptHashes, placement_request

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSettings:
    """What the settings file says of running requests. `speculate` is the server's default; `projected_tokens` as of
    the decode workers."""

    max_running_requests: int
    max_attempts: int
    timeout_s: float
    handoff_wait_s: float
    recovery_wait_s: float
    ttft_target_ms: float | None
    speculate: int
    projected_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Everything about a request that ended without an error. `stop_reason` as in `StreamEnd`; `placement` is the last
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


class RunningRequest:
    """One request on its way. Iterate over it to the end, or close it; it is forgotten by itself."""

    def __init__(self, request: Request, journey: Journey, on_first: Callable[[], None]) -> None:
        self.request = request
        self._journey = journey
        self._on_first = on_first
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self, runner: JourneyRunner) -> asyncio.Task[None]:
        self._task = asyncio.create_task(runner.run(), name=f"journey {self._journey.journey_id}")
        self._task.add_done_callback(lambda _: self._chunks.put_nowait(None))
        return self._task

    def emit(self, chunk: Chunk) -> None:
        if chunk.index == 0:
            self._on_first()
        self._chunks.put_nowait(chunk)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Tokens as they come; those that came while the reader was busy in one chunk."""
        while (chunk := await self._chunks.get()) is not None:
            ended = False
            while not self._chunks.empty() and not ended:
                following = self._chunks.get_nowait()
                if following is None:
                    ended = True
                else:
                    chunk = Chunk(chunk.index, chunk.tokens + following.tokens, chunk.text + following.text)
            yield chunk
            if ended:
                return

    def result(self) -> Result:
        """After the last chunk.

        Raises:
            PdRelayError: the request was rejected or has failed.
        """
        journey = self._journey
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

    def cancel(self) -> None:
        """Ends it, unless it has ended; everything it holds anywhere is released."""
        self._journey.cancel()
        self._end()

    def fail(self, error: PdRelayError) -> None:
        """Ends it too; `result` raises the error."""
        self._journey.give_up(error)
        self._end()

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()


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
        self._gate = RoomGate(registry)
        self._admission = Admission(max_running_requests=settings.max_running_requests)
        self._running: dict[str, RunningRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    def admit(self) -> None:
        """To be asked before work is spent on a request.

        Raises:
            ResourceExhausted: too many run; with a retry hint.
            Unavailable: the router is stopping, or a pool has no worker.
        """
        if self._draining:
            raise _stopping()
        self._admission.admit(len(self._running))

    @contextlib.asynccontextmanager
    async def run(self, request: Request) -> AsyncIterator[RunningRequest]:
        """A started request; leaving the block before its end cancels it.

        Raises:
            AlreadyExists: a request with this id is running.
            ResourceExhausted, Unavailable: as `admit`.
        """
        running = self._start(request)
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

    def _start(self, request: Request) -> RunningRequest:
        self.admit()
        if request.request_id in self._running:
            raise AlreadyExists(f"a request with id {request.request_id!r} is running")
        now_s = asyncio.get_running_loop().time
        begun_s = now_s()
        stream = TokenStream(
            text=OutputText(self._tokenizer, request.params.stop, min_tokens=request.params.min_tokens),
            ending_ids=request.ending_ids,
            max_tokens=request.params.max_tokens,
        )
        journey = Journey(self._new_id(), stream, max_attempts=self._settings.max_attempts)
        running = RunningRequest(
            request, journey, on_first=lambda: self._metrics.note_first_token(now_s() - begun_s)
        )
        runner = JourneyRunner(
            request,
            journey,
            registry=self._registry,
            gate=self._gate,
            speculate=self._speculate(request),
            projected_tokens=self._settings.projected_tokens,
            emit=running.emit,
            timeout_s=self._settings.timeout_s,
            handoff_wait_s=self._settings.handoff_wait_s,
            recovery_wait_s=self._settings.recovery_wait_s,
            ttft_target_ms=self._settings.ttft_target_ms,
        )
        task = running.start(runner)
        self._running[request.request_id] = running
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, request, journey, now_s() - begun_s))
        return running

    def _speculate(self, request: Request) -> int:
        """Draft tokens a step."""
        wanted = request.params.speculate
        return min(self._settings.speculate if wanted is None else wanted, self._registry.max_speculate)

    def _ended(self, task: asyncio.Task[None], request: Request, journey: Journey, seconds: float) -> None:
        self._tasks.discard(task)
        del self._running[request.request_id]
        self._admission.note_end(seconds * 1000)
        self._metrics.note_end(journey, num_prompt_tokens=len(request.prompt_ids), seconds=seconds)
        log.info(
            "request %s, journey %s: %s after %d attempts, %d + %d tokens, %.1f ms%s",
            request.request_id,
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
