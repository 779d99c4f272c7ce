"""The connection to one worker: its streams, the calls of journeys to it, and when it counts as lost.

A worker is ready from its first load report on. It is lost when one of its streams breaks or its lifeline ends, when
its epoch changes, or when it has been silent for longer than a busy host makes anyone (`router.worker_silence_ms`), or
for a shorter time and its host's kernel does not answer either. A single late answer loses nobody. Every journey there
is told then, and the link connects anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import grpc.aio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import ErrorCode, FailedPrecondition, PdRelayError, Unavailable
from pd_router.breaker import Breaker, jittered_s
from pd_router.cache_feed import follow_cache
from pd_router.lifeline import WorkerLifeline
from pd_router.link_state import TRANSITIONS, LinkState, Role, WorkerEndpoint
from pd_router.pools import WorkerView
from pd_router.prefix_index import PrefixIndex
from pd_router.releases import ReleaseQueue
from pd_router.renewals import Renewals
from pd_router.worker_calls import WorkerCalls
from pd_router.worker_load import WorkerLoad

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
NUM_TICKS = 8  # of silence before a worker is lost, at least
MAX_TICK_S = 0.25
CUT_S = 1.75   # of silence, where its host does not answer on its lifeline
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
_WORKER_FAULTS = frozenset(
    {ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.DATA_LOSS, ErrorCode.INTERNAL}
)


class Passenger(Protocol):
    """A journey as the link to a worker that it uses sees it.

    Attributes:
        itl_limit_ms: the most that it is to wait between two tokens; inf: as long as it takes.
    """

    itl_limit_ms: float

    def on_event(self, link: WorkerLink, event: pb.TokensEvent) -> None: ...

    def on_lost(self, link: WorkerLink, error: PdRelayError) -> None: ...

    def renewable(self, link: WorkerLink) -> pb.JourneyRef | None:
        """What to renew there, None while the worker has granted nothing yet."""

    def on_gone(self, link: WorkerLink, ref: pb.JourneyRef) -> None:
        """The worker does not know the journey any more."""


class WorkerLink:
    """Attributes:
    calls: to the worker.
    info: what the worker said of itself when it last connected; None before.
    is_accepted: it fits the others, and has not been lost since.
    load: its last report, and what this router has sent there since.
    view: as placement sees it; None: something has changed since it was made.
    state_since_s: on the clock of its event loop.
    error: why it was lost or refused.
    breaker: whether journeys may be sent there; a lost worker begins anew with it.
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        *,
        channel: grpc.aio.Channel,
        router_id: str,
        renew_interval_s: float,
        silence_s: float,
        index: PrefixIndex,
        check: Callable[[WorkerLink, pb.WorkerInfo], None],
        on_change: Callable[[], None],
    ) -> None:
        """`channel` is closed with the link. `silence_s`: after which the worker is lost. `index` learns what it has
        cached. `check` raises FailedPrecondition for one that does not fit the others."""
        self.endpoint = endpoint
        self.role = Role(endpoint.role)
        self.state = LinkState.STARTING
        self.state_since_s = asyncio.get_running_loop().time()
        self.info: pb.WorkerInfo | None = None
        self.is_accepted = False
        self.load = WorkerLoad()
        self.view: WorkerView | None = None
        self.error: PdRelayError | None = None
        self._random = random.Random(f"{router_id} {endpoint.worker_id}")
        self.breaker = Breaker(self._random)
        self.passengers: dict[str, Passenger] = {}
        self._unreleased: set[str] = set()  # journeys that were here, and have not given back what they hold
        self._empty = asyncio.Event()  # neither passengers nor these
        self._empty.set()
        self.settled = asyncio.Event()  # ready, lost or refused for the first time
        self.router_id = router_id
        self._renew_interval_s = renew_interval_s
        self._silence_s = silence_s
        self._heard = False
        self._index = index
        self._check = check
        self._on_change = on_change
        self.calls = WorkerCalls(
            self.worker_id,
            channel,
            router_id=router_id,
            silence_s=silence_s,
            check_epoch=self._check_epoch,
            on_heard=self._note_heard,
        )
        self._releases = ReleaseQueue(self.worker_id, self.calls.worker)
        self._task = asyncio.create_task(self._run(), name=f"link to {self.worker_id}")

    @property
    def worker_id(self) -> str:
        return self.endpoint.worker_id

    @property
    def epoch(self) -> str:
        return self.info.epoch if self.info is not None else ""

    @property
    def loads(self) -> pb.LoadsReply | None:
        """Its last report of this life; None before the first."""
        return self.load.report

    def attach(self, journey_id: str, passenger: Passenger) -> None:
        """From now on the journey hears of its tokens and of the worker's loss."""
        self.passengers[journey_id] = passenger
        self._unreleased.add(journey_id)
        self.breaker.note_sent(journey_id, asyncio.get_running_loop().time())
        self.load.note_arrival(journey_id)
        self.view = None
        self._empty.clear()

    def detach(self, journey_id: str) -> None:
        self.passengers.pop(journey_id, None)
        self.breaker.note_gone(journey_id)
        self.load.note_departure(journey_id)
        self.view = None
        self._note_left()

    @property
    def takes_work(self) -> bool:
        """Whether a journey may be sent there now."""
        is_ready = self.state is LinkState.READY and self.endpoint.is_expected
        return is_ready and self.breaker.takes_work(asyncio.get_running_loop().time())

    def note_success(self, journey_id: str) -> None:
        """It has done something for a journey."""
        before = self.breaker.is_open
        self.breaker.note_success(journey_id)
        if before and not self.breaker.is_open:
            log.info("worker %s works again", self.worker_id)
            self.view = None
            self._on_change()

    def note_failure(self, journey_id: str, error: PdRelayError) -> None:
        """An attempt has failed there. What is the request's own fault, and the loss of the worker, are not counted."""
        if error.code not in _WORKER_FAULTS or self.state not in (LinkState.READY, LinkState.DRAINING):
            return
        loop = asyncio.get_running_loop()
        self.breaker.note_failure(journey_id, loop.time())
        self.view = None
        opens_in_s = self.breaker.opens_in_s(loop.time())
        if opens_in_s > 0:
            log.warning("worker %s fails, is left alone for %.1f s: %s", self.worker_id, opens_in_s, error.message)
            loop.call_later(opens_in_s, self._half_open)

    def _half_open(self) -> None:
        self.view = None
        self._on_change()

    def assign_tokens(self, num_tokens: int) -> int:
        """A prompt is about to be sent there. Returns what `note_computed` wants to know."""
        self.view = None
        return self.load.assign_tokens(num_tokens)

    def note_computed(self, num_tokens: int, assigned_at: int) -> None:
        """It waits there no more."""
        self.view = None
        self.load.note_computed(num_tokens, assigned_at)

    def assign_blocks(self, num_blocks: int) -> None:
        """They are about to be asked for."""
        self.view = None
        self.load.assign_blocks(num_blocks)

    def note_no_room(self) -> None:
        """It refused for lack of room: until its next report it is taken to have none."""
        self.view = None
        self.load.note_no_room()

    async def close(self) -> None:
        """Tells the passengers that the worker is lost, sends what they release, and ends; all within a bound."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._lose(Unavailable(f"worker {self.worker_id} was removed"), level=logging.DEBUG)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._empty.wait()
        await self._releases.close()
        await self.calls.close()

    def release(self, journey_id: str, up_to_attempt: int, reason: str) -> None:
        """Ends everything of the journey there; in the background, bounded, several at once."""
        self._releases.add(journey_id, up_to_attempt, reason)
        self._unreleased.discard(journey_id)
        self._note_left()

    def _note_left(self) -> None:
        if not self.passengers and not self._unreleased:
            self._empty.set()

    async def flushed(self) -> None:
        """Until everything that was released so far has been sent, or given up."""
        await self._releases.flushed()

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
            await asyncio.sleep(jittered_s(backoff_s, self._random))
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _live(self) -> None:
        """Connects and follows the worker's streams; raises when that is over."""
        info = await self.calls.info()
        self._check(self, info)
        self.info = info
        self.is_accepted = True
        self.view = None
        renewals = Renewals(
            self.calls, interval_s=self._renew_interval_s, held=self._renewable, on_gone=self._tell_gone
        )
        lifeline = None
        if info.lifeline_port:
            lifeline = WorkerLifeline(self.worker_id, self.endpoint.address, info.lifeline_port)
        loops = [self._follow_loads(), self._follow_cache(), renewals.run(), self._watch_silence(lifeline)]
        if self.role is Role.DECODE:
            loops.append(self._follow_tokens())
        if lifeline is not None:
            loops.append(lifeline.until_ended())
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
        async for loads in self.calls.loads():
            self.load.note_report(loads)
            self.view = None
            self._move(LinkState.DRAINING if loads.state == "draining" else LinkState.READY)
            self._on_change()

    async def _follow_cache(self) -> None:
        await follow_cache(self._index, self.worker_id, self.epoch, self.calls.cache_events)

    async def _follow_tokens(self) -> None:
        async for batch in self.calls.tokens():
            for event in batch.events:
                passenger = self.passengers.get(event.journey.journey_id)
                if passenger is not None:
                    passenger.on_event(self, event)

    def _renewable(self) -> list[pb.JourneyRef]:
        refs = [passenger.renewable(self) for passenger in self.passengers.values()]
        return [ref for ref in refs if ref is not None]

    def _tell_gone(self, ref: pb.JourneyRef) -> None:
        passenger = self.passengers.get(ref.journey_id)
        if passenger is not None:
            passenger.on_gone(self, ref)

    def _note_heard(self) -> None:
        self._heard = True

    async def _watch_silence(self, lifeline: WorkerLifeline | None) -> None:
        """Raises Unavailable once the worker has been silent for long, or its host with it for a while.

        Time is counted in ticks of this loop, and one that is late counts as one: this process was held up, and what
        the worker said may still wait to be read. A loop that is late each time finds a silent worker later by as much.
        """
        silent_s = 0.0
        while silent_s < self._silence_s:
            self._heard = False
            tick_s = min(self._silence_s / NUM_TICKS, MAX_TICK_S)
            await asyncio.sleep(tick_s)
            silent_s = 0.0 if self._heard else silent_s + tick_s
            if silent_s >= CUT_S and lifeline is not None and lifeline.is_unanswered():
                raise Unavailable(f"worker {self.worker_id} and its host have said nothing for {silent_s:g} s")
        raise Unavailable(f"worker {self.worker_id} has said nothing for {self._silence_s:g} s")

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
        self.is_accepted = False
        self.breaker = Breaker(self._random)
        self.load.note_lost()
        self.view = None
        self._move(state)
        for passenger in list(self.passengers.values()):
            passenger.on_lost(self, error)
        self._on_change()

    def _move(self, state: LinkState) -> None:
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.worker_id}: {self.state.value} -> {state.value}"
            self.state = state
            self.state_since_s = asyncio.get_running_loop().time()
            self.view = None
            if state is LinkState.READY:
                self.error = None
                log.info("worker %s at %s is ready, epoch %s", self.worker_id, self.endpoint.address, self.epoch)
        self.settled.set()
