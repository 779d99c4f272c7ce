"""The connection to one worker: its streams, the calls of journeys to it, and when it counts as lost.

A worker is ready from its first load report on. It is lost when one of its streams breaks (keepalive finds a cut link
or a stopped process within seconds) or its epoch changes; every journey there is told, and the link connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import grpc

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import DeadlineExceeded, FailedPrecondition, PdRelayError, Unavailable
from pd_engine.service.client import connect, decode_stub, prefill_stub, typed_error, worker_stub
from pd_router.releases import ReleaseQueue

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0  # of calls that a healthy worker answers at once
LOADS_INTERVAL_MS = 200
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
MAX_JOURNEYS_A_RENEWAL = 5_000


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """Where a worker is to be found; `role` is "prefill" or "decode", `address` is "host:port"."""

    worker_id: str
    role: str
    address: str


class LinkState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


TRANSITIONS: dict[LinkState, frozenset[LinkState]] = {
    LinkState.STARTING: frozenset({LinkState.READY, LinkState.DRAINING, LinkState.LOST, LinkState.REFUSED}),
    LinkState.READY: frozenset({LinkState.DRAINING, LinkState.LOST}),
    LinkState.DRAINING: frozenset({LinkState.READY, LinkState.LOST}),
    LinkState.LOST: frozenset({LinkState.READY, LinkState.DRAINING, LinkState.REFUSED}),
    LinkState.REFUSED: frozenset({LinkState.READY, LinkState.DRAINING, LinkState.LOST}),
}


class Passenger(Protocol):
    """A journey as the link to a worker that it uses sees it."""

    def on_event(self, link: WorkerLink, event: pb.TokensEvent) -> None: ...

    def on_lost(self, link: WorkerLink, error: PdRelayError) -> None: ...

    def renewable(self, link: WorkerLink) -> pb.JourneyRef | None:
        """What to renew there, None while the worker has granted nothing yet."""

    def on_gone(self, link: WorkerLink, ref: pb.JourneyRef) -> None:
        """The worker does not know the journey any more."""


class WorkerLink:
    """Attributes:
    info: what the worker said of itself when it last connected; None before.
    loads: its last report of this life; None before the first.
    num_assigned_blocks: promised to journeys since that report.
    num_assigned_tokens: of prompts that this router has there and that are not prefilled yet.
    has_room: False after it refused for lack of room, until its next report.
    error: why it was lost or refused.
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        *,
        router_id: str,
        secret: str,
        renew_interval_s: float,
        check: Callable[[WorkerLink, pb.WorkerInfo], None],
        on_change: Callable[[], None],
    ) -> None:
        """`check` raises FailedPrecondition for a worker that does not fit the others."""
        self.endpoint = endpoint
        self.role = Role(endpoint.role)
        self.state = LinkState.STARTING
        self.info: pb.WorkerInfo | None = None
        self.loads: pb.LoadsReply | None = None
        self.num_assigned_blocks = 0
        self.num_assigned_tokens = 0
        self.has_room = True
        self.error: PdRelayError | None = None
        self.passengers: dict[str, Passenger] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.settled = asyncio.Event()  # ready, lost or refused for the first time
        self.router_id = router_id
        self._renew_interval_s = renew_interval_s
        self._check = check
        self._on_change = on_change
        self._gone_before: set[str] = set()
        self._channel = connect(endpoint.address, secret)
        self._worker = worker_stub(self._channel)
        self._prefill = prefill_stub(self._channel)
        self._decode = decode_stub(self._channel)
        self._releases = ReleaseQueue(self.worker_id, self._worker)
        self._task = asyncio.create_task(self._run(), name=f"link to {self.worker_id}")

    @property
    def worker_id(self) -> str:
        return self.endpoint.worker_id

    @property
    def epoch(self) -> str:
        return self.info.epoch if self.info is not None else ""

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait or run at a prefill worker, as it reported or as this router knows better."""
        reported = self.loads.queued_prefill_tokens if self.loads is not None else 0
        return max(reported, self.num_assigned_tokens)

    def attach(self, journey_id: str, passenger: Passenger) -> None:
        """From now on the journey hears of its tokens and of the worker's loss."""
        self.passengers[journey_id] = passenger
        self._empty.clear()

    def detach(self, journey_id: str) -> None:
        self.passengers.pop(journey_id, None)
        if not self.passengers:
            self._empty.set()

    async def close(self) -> None:
        """Tells the passengers that the worker is lost, sends what they release, and ends; all within a bound."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._lose(Unavailable(f"worker {self.worker_id} was removed"), level=logging.DEBUG)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), CALL_TIMEOUT_S)
        await self._releases.close()
        await self._channel.close()

    # Calls of journeys

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        with self._typed("Reserve"):
            reply = await self._decode.Reserve(request, timeout=CALL_TIMEOUT_S)
        self._check_epoch(reply.epoch)
        return reply

    async def pull(self, request: pb.PullRequest) -> None:
        with self._typed("Pull"):
            reply = await self._decode.Pull(request, timeout=CALL_TIMEOUT_S)
        self._check_epoch(reply.epoch)

    async def prefill(self, request: pb.PrefillRequest) -> AsyncIterator[pb.PrefillReply]:
        """The replies, until the first token; the request's own deadline bounds it."""
        call = self._prefill.Prefill(request)
        try:
            with self._typed("Prefill"):
                async for reply in call:
                    yield reply
        finally:
            call.cancel()

    def release(self, journey_id: str, up_to_attempt: int, reason: str) -> None:
        """Ends everything of the journey there; in the background, bounded, several at once."""
        self._releases.add(journey_id, up_to_attempt, reason)

    async def flushed(self) -> None:
        """Until everything that was released so far has been sent, or given up."""
        await self._releases.flushed()

    @contextlib.contextmanager
    def _typed(self, call: str) -> Any:
        """A failed call as a typed error that says which worker it was; one not answered in time is Unavailable."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            typed = typed_error(error)
            if isinstance(typed, DeadlineExceeded):
                raise Unavailable(f"worker {self.worker_id} did not answer {call} in time") from None
            if error.code() is grpc.StatusCode.CANCELLED:
                raise Unavailable(f"worker {self.worker_id} cancelled {call}") from None
            raise typed from None

    # The link's own life

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                await self._live()
            except PdRelayError as error:
                if self.state in (LinkState.READY, LinkState.DRAINING):
                    backoff_s = MIN_BACKOFF_S
                self._lose(error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _live(self) -> None:
        """Connects and follows the worker's streams; raises when that is over."""
        with self._typed("Info"):
            info = await self._worker.Info(pb.InfoRequest(), timeout=CALL_TIMEOUT_S)
        self._check(self, info)
        self.info = info
        loops = [self._follow_loads(), self._renew()]
        if self.role is Role.DECODE:
            loops.append(self._follow_tokens())
        await self._first_end(loops)

    async def _first_end(self, loops: list[Coroutine[Any, Any, None]]) -> None:
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            raise Unavailable(f"worker {self.worker_id} ended its stream")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_loads(self) -> None:
        with self._typed("Loads"):
            async for loads in self._worker.Loads(pb.LoadsRequest(interval_ms=LOADS_INTERVAL_MS)):
                self._check_epoch(loads.epoch)
                self.loads = loads
                self.num_assigned_blocks = 0
                self.has_room = True
                self._move(LinkState.DRAINING if loads.state == "draining" else LinkState.READY)
                self._on_change()

    async def _follow_tokens(self) -> None:
        with self._typed("Tokens"):
            async for batch in self._worker.Tokens(pb.TokensRequest(router_id=self.router_id)):
                self._check_epoch(batch.epoch)
                for event in batch.events:
                    passenger = self.passengers.get(event.journey.journey_id)
                    if passenger is not None:
                        passenger.on_event(self, event)

    async def _renew(self) -> None:
        """Keeps what journeys hold there, and finds those that the worker has lost.

        A journey counts as gone when two renewals in a row say so: its end may be on its way in another stream.
        """
        while True:
            await asyncio.sleep(self._renew_interval_s)
            refs = [ref for p in list(self.passengers.values()) if (ref := p.renewable(self)) is not None]
            gone: set[str] = set()
            for start in range(0, len(refs), MAX_JOURNEYS_A_RENEWAL):
                request = pb.RenewRequest(
                    router_id=self.router_id, journeys=refs[start : start + MAX_JOURNEYS_A_RENEWAL]
                )
                with self._typed("Renew"):
                    reply = await self._worker.Renew(request, timeout=CALL_TIMEOUT_S)
                self._check_epoch(reply.epoch)
                for state in reply.states:
                    if state.state == "gone":
                        self._note_gone(state.journey, gone)
            self._gone_before = gone

    def _note_gone(self, ref: pb.JourneyRef, gone: set[str]) -> None:
        key = f"{ref.journey_id}/{ref.attempt}"
        passenger = self.passengers.get(ref.journey_id)
        if passenger is not None and key in self._gone_before:
            passenger.on_gone(self, ref)
        else:
            gone.add(key)

    def _check_epoch(self, epoch: str) -> None:
        if epoch != self.epoch:
            raise Unavailable(f"worker {self.worker_id} has begun another life")

    def _lose(self, error: PdRelayError, *, level: int = logging.WARNING) -> None:
        refused = isinstance(error, FailedPrecondition)
        state = LinkState.REFUSED if refused else LinkState.LOST
        if state is not self.state:
            log.log(
                level, "worker %s at %s is %s: %s", self.worker_id, self.endpoint.address, state.value, error.message
            )
        if self.state in (LinkState.READY, LinkState.DRAINING):
            self._move(LinkState.LOST)
        self.error = error
        self.loads = None
        self._gone_before = set()
        self._move(state)
        for passenger in list(self.passengers.values()):
            passenger.on_lost(self, error)
        self._on_change()

    def _move(self, state: LinkState) -> None:
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.worker_id}: {self.state.value} -> {state.value}"
            self.state = state
            if state is LinkState.READY:
                self.error = None
                log.info("worker %s at %s is ready, epoch %s", self.worker_id, self.endpoint.address, self.epoch)
        self.settled.set()
