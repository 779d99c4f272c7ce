"""Runs one drill: traffic, a failure, recovery, quiet; then every answer is compared with one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pd_engine.contracts import api_pb2
from pd_engine.errors import FailedPrecondition, PdRelayError
from pd_engine.settings import Settings
from pd_ops.client import RouterClient, router_client
from pd_ops.drills.access import Access
from pd_ops.drills.catalog import DRILLS, Drill
from pd_ops.drills.judging import Observed, judge
from pd_ops.drills.observer import Observer, seen_full, seen_lost
from pd_ops.drills.report import DrillResult
from pd_ops.drills.scene import Broken, Scene
from pd_ops.drills.traffic import Asked, Schedule, Traffic
from pd_ops.monolithic import Monolithic
from pd_ops.verification.oracle import expected_outcome
from pd_ops.verification.outcome import Outcome, answer_difference
from pd_ops.verification.remote import Request

QUIET_S = 30.0   # in which everything must be released after the last request
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillPlan:
    """Attributes:
    requests: that clients ask, over and over.
    schedule: when each of them is due; None: by `num_clients` clients, each without a pause.
    recovery_s: in which the pools must be whole again, and a request answered.
    """

    access: Access
    address: str
    target: str | None
    settings: Settings
    model: api_pb2.GetModelInfoResponse
    requests: Sequence[Request]
    schedule: Schedule | None
    num_clients: int
    recovery_s: float


class DrillRunner:
    """Args:
    oracle: the same model in this process.
    note: told what happens.
    """

    def __init__(self, plan: DrillPlan, oracle: Monolithic, note: Callable[[str], None]) -> None:
        self._plan = plan
        self._oracle = oracle
        self._note = note
        self._expected: dict[int, Outcome] = {}  # by id() of a steady request
        self._sizes: dict[str, int] | None = None  # of the pools, before the first drill

    async def run(self, name: str) -> DrillResult:
        """Raises:
        FailedPrecondition: the cluster lacks what the drill breaks, or is not whole since an earlier drill.
        """
        drill, plan, began = DRILLS[name], self._plan, time.monotonic()
        plan.access.hands.check(*drill.faults)
        traffic = Traffic(
            plan.address, plan.requests, num_clients=plan.num_clients, give_up_s=plan.recovery_s,
            schedule=plan.schedule,
        )
        scene = Scene(
            access=plan.access, address=plan.address, settings=plan.settings, model=plan.model, traffic=traffic,
            note=self._note, give_up_s=plan.recovery_s, target=plan.target,
        )
        async with router_client(plan.address) as client, _in_background(Observer(plan.address)) as observer:
            sizes = await self._whole(observer)
            async with _steady(traffic):
                await traffic.wait_done(plan.num_clients)
                broken = await drill.run(scene)
                full_s = await self._recovered(observer, drill, broken, sizes)
                is_mended = None if broken.mend is None else await broken.mend()
                await traffic.wait_done(plan.num_clients)
            num_leaked = await self._leaked(client)
        load = os.getloadavg()[0]
        asked = [*traffic.asked, *(one for extra, _ in scene.extra for one in extra.asked)]
        self._note(f"comparing {len(asked)} answers with one process")
        differences = await asyncio.to_thread(self._compare, traffic, scene)
        seen = Observed(
            asked=asked, steady=traffic.asked, differences=differences, num_leaked_blocks=num_leaked, sizes=sizes,
            sightings=observer.sightings, broken=broken, full_s=full_s, is_mended=is_mended,
            may_be_too_much=plan.schedule is not None,
        )
        return judge(name, drill, seen, seconds=time.monotonic() - began, load=load)

    async def _whole(self, observer: Observer) -> dict[str, int]:
        """Ready workers by role: as before the first drill, else nothing seen after this one means anything."""
        await observer.wait_sighting()
        if self._sizes is None:
            self._sizes = observer.sightings[-1].num_ready()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._plan.recovery_s):
                while observer.sightings[-1].num_ready() != self._sizes:
                    await observer.wait_sighting()
                return self._sizes
        raise FailedPrecondition(
            f"ready workers are {observer.sightings[-1].num_ready()}, and were {self._sizes} before the first drill"
        )

    async def _recovered(
        self, observer: Observer, drill: Drill, broken: Broken, sizes: dict[str, int]
    ) -> float | None:
        """When the pools were whole again, None if they were not in time."""
        deadline_s = time.monotonic() + self._plan.recovery_s
        while time.monotonic() < deadline_s:
            since_s: float | None = broken.is_over_s
            if drill.is_noticed:
                lost_s = seen_lost(observer.sightings, broken.target, broken.epoch, broken.at_s)
                since_s = None if lost_s is None else max(lost_s, broken.is_over_s)
            if since_s is not None and (full_s := seen_full(observer.sightings, sizes, since_s)) is not None:
                return full_s
            await asyncio.sleep(POLL_S)
        return None

    async def _leaked(self, client: RouterClient) -> int | None:
        """Blocks that are not free once everything has had time to be released; None: the router did not answer."""
        deadline_s, held = time.monotonic() + QUIET_S, None
        while time.monotonic() < deadline_s:
            with contextlib.suppress(PdRelayError):
                info = await client.server_info()
                held = sum(worker.num_blocks_total - worker.num_blocks_free for worker in info.workers)
                if held == 0 and info.active_requests == 0:
                    return 0
            await asyncio.sleep(POLL_S)
        return held

    def _compare(self, traffic: Traffic, scene: Scene) -> dict[int, str]:
        """What is wrong, by id() of what was asked. In a thread of its own."""
        wrong: dict[int, str] = {}
        for asked in traffic.asked:
            self._check(asked, self._plan.requests[asked.number], wrong, keep=True)
        for extra, requests in scene.extra:
            for asked in extra.asked:
                self._check(asked, requests[asked.number], wrong, keep=False)
        return wrong

    def _check(self, asked: Asked, request: Request, wrong: dict[int, str], *, keep: bool) -> None:
        if asked.mismatch is not None:
            wrong[id(asked)] = asked.mismatch
        elif asked.outcome is not None:
            expected = self._expected.get(id(request)) or expected_outcome(self._oracle, request)
            if keep:
                self._expected[id(request)] = expected
            if (difference := answer_difference(expected, asked.outcome)) is not None:
                wrong[id(asked)] = difference


@contextlib.asynccontextmanager
async def _in_background(observer: Observer) -> AsyncIterator[Observer]:
    task = asyncio.create_task(observer.run())
    try:
        yield observer
    finally:
        await _cancelled(task)


@contextlib.asynccontextmanager
async def _steady(traffic: Traffic) -> AsyncIterator[None]:
    """Traffic for the time of the context; at its end running requests go on to theirs."""
    task = asyncio.create_task(traffic.run())
    try:
        yield
        traffic.stop()
        await task
    finally:
        await _cancelled(task)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
