"""Clients that ask one request after the other, or each when it is due, and do what a client should when its answer
breaks: ask again."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_engine.errors import PdRelayError, ResourceExhausted, Unavailable
from pd_ops.client import RouterClient, router_client
from pd_ops.request_options import to_request
from pd_ops.verification.outcome import Outcome, outcome_of
from pd_ops.verification.remote import Request

RETRY_S = 0.1


@dataclass(kw_only=True, slots=True)
class Asked:
    """One request as its client saw it. Times are seconds of one monotonic clock.

    Attributes:
        number: which of the requests it is.
        token_ids: that have come, each once.
        arrivals_s: when tokens came that had not been there before.
        num_chunks: messages with tokens, repeated ones too.
        num_refused: streams that ended without any: nobody answered, or with "not now".
        num_broken: streams that ended after some, before their end.
        interruptions: what these streams ended with.
        outcome: None as long as there is none.
        error: why there is none and none will come.
        mismatch: what a resumed stream repeated differently.
    """

    number: int
    start_s: float
    end_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    num_chunks: int = 0
    num_refused: int = 0
    num_broken: int = 0
    interruptions: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    error: str | None = None
    mismatch: str | None = None

    def take(self, index: int, token_ids: Sequence[int], now_s: float) -> None:
        self.num_chunks += 1
        known = self.token_ids[index : index + len(token_ids)]
        if index > len(self.token_ids) or list(token_ids[: len(known)]) != known:
            self.mismatch = f"tokens from {index} on: {list(token_ids)} after {self.token_ids}"
        elif len(known) < len(token_ids):
            self.token_ids.extend(token_ids[len(known) :])
            self.arrivals_s.append(now_s)

    def largest_gap_ms(self) -> float:
        """In which nothing came: before the first token, between two, or before the end."""
        times = [self.start_s, *self.arrivals_s, *([self.end_s] if self.end_s is not None else [])]
        return 1e3 * max((after - before for before, after in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When each request is due after the beginning, and after how long the first one is due again."""

    due_s: Sequence[float]
    period_s: float


class Traffic:
    """Args:
    requests: asked in turn, by all clients together.
    give_up_s: after which a client takes a request for lost.
    limit: requests in all; None: until `stop`.
    schedule: when requests are asked, whatever became of those before; None: by a client after its last one.
    """

    def __init__(
        self, address: str, requests: Sequence[Request], *, num_clients: int, give_up_s: float,
        limit: int | None = None, schedule: Schedule | None = None,
    ) -> None:
        self.asked: list[Asked] = []
        self.num_clients = num_clients
        self._address = address
        self._requests = requests
        self._give_up_s = give_up_s
        self._limit = limit
        self._schedule = schedule
        self._stopping = asyncio.Event()
        self._failure: Exception | None = None
        self._change = asyncio.Event()

    def stop(self) -> None:
        """No further request; those that run go on to their end."""
        self._stopping.set()

    async def run(self) -> None:
        """Until the limit, or until it is stopped and all has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._schedule is not None:
                    group.create_task(self._ask_when_due(self._schedule))
                else:
                    for _ in range(self.num_clients):
                        group.create_task(self._client())
        except ExceptionGroup as failures:
            self._failure = failures.exceptions[0]
            self._change.set()
            raise self._failure from None

    @property
    def num_done(self) -> int:
        return sum(asked.end_s is not None for asked in self.asked)

    async def wait_done(self, count: int) -> None:
        """Until so many more requests have ended."""
        wanted = self.num_done + count
        while self.num_done < wanted:
            await self._changed()

    async def wait_streaming(self) -> None:
        """Until a request that has not ended has tokens."""
        while not any(asked.token_ids and asked.end_s is None for asked in self.asked):
            await self._changed()

    async def _changed(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._change.clear()
        await self._change.wait()

    async def _client(self) -> None:
        async with router_client(self._address) as client:
            while not self._stopping.is_set() and (self._limit is None or len(self.asked) < self._limit):
                await self._one(client)

    async def _ask_when_due(self, schedule: Schedule) -> None:
        begun_s = time.monotonic()
        async with router_client(self._address) as client, asyncio.TaskGroup() as group:
            for turn in itertools.count():
                for due_s in schedule.due_s:
                    if await self._stopped_by(begun_s + turn * schedule.period_s + due_s):
                        return
                    group.create_task(self._one(client))

    async def _stopped_by(self, time_s: float) -> bool:
        """Whether it is stopped before that time comes."""
        try:
            async with asyncio.timeout(max(0.0, time_s - time.monotonic())):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _one(self, client: RouterClient) -> None:
        asked = Asked(number=len(self.asked) % len(self._requests), start_s=time.monotonic())
        self.asked.append(asked)
        try:
            async with asyncio.timeout(self._give_up_s):
                await self._ask(client, asked)
        except TimeoutError:
            asked.error = f"no answer in {self._give_up_s:g} s"
        asked.end_s = time.monotonic()
        self._change.set()

    async def _ask(self, client: RouterClient, asked: Asked) -> None:
        while asked.outcome is None and asked.error is None:
            before = asked.num_chunks
            try:
                await self._attempt(client, asked)
            except (Unavailable, ResourceExhausted) as error:
                asked.interruptions.append(error.message)
                if asked.num_chunks > before:
                    asked.num_broken += 1
                else:
                    asked.num_refused += 1
                await asyncio.sleep(max(RETRY_S, (error.retry_after_ms or 0) / 1e3))
            except PdRelayError as error:
                asked.error = f"{error.code.value}: {error.message}"

    async def _attempt(self, client: RouterClient, asked: Asked) -> None:
        request = self._requests[asked.number]
        async for response in client.stream(to_request(request.prompt, request.sampling)):
            if response.HasField("chunk"):
                asked.take(response.chunk.index, response.chunk.token_ids, time.monotonic())
                self._change.set()
            elif response.HasField("complete"):
                asked.outcome = outcome_of(response.complete)
                if list(asked.outcome.token_ids) != asked.token_ids:
                    asked.mismatch = f"the end says {asked.outcome.token_ids}, the stream said {asked.token_ids}"
                return
        raise Unavailable("the stream ended without a result")
