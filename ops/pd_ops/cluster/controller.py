"""Starts, watches and ends the actors of one cluster, as its plan says."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import RayError

from pd_engine.errors import DeadlineExceeded, Internal, PdRelayError, ResourceExhausted, Unavailable
from pd_engine.service.secret import new_secret
from pd_engine.settings import Settings
from pd_ops.cluster.actors import (
    Failure,
    RouterActor,
    RouterStarted,
    WorkerActor,
    WorkerPlace,
    actor_log_path,
)
from pd_ops.cluster.plan import ActorPlan, ClusterPlan, Role, check_placeable

STOP_MARGIN_S = 3.0
T = TypeVar("T")
ray: Any = importlib.import_module("ray")  # Any: it is typed in parts only

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Actor:
    plan: ActorPlan
    handle: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyWorker:
    """A worker that serves. `epoch` names this life of its process."""

    worker_id: str
    role: Role
    pid: int
    address: str
    epoch: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyCluster:
    """A cluster that serves."""

    router: RouterStarted
    workers: tuple[ReadyWorker, ...]


class Controller:
    """The actors of one cluster.

    Needs a connected Ray, whose processes it does not end.

    Args:
        host: that workers listen on; None: each on the address that Ray knows its host by.
    """

    def __init__(self, settings: Settings, plan: ClusterPlan, *, host: str | None) -> None:
        self._settings = settings
        self._plan = plan
        self._host = host
        self._secret = new_secret()
        self._actors: list[_Actor] = []
        self._places: list[WorkerPlace] = []
        self._deaths: set[asyncio.Future[str]] = set()

    async def start(self) -> ReadyCluster:
        """Places all actors at once, waits until all serve, and tells the router its workers.

        Raises:
            PdRelayError: of the first actor that failed, whose name and log stand in the message.
            DeadlineExceeded: not ready in time (`cluster.start_timeout_s`).
        """
        timeout_s = self._settings.cluster.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._start()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the cluster was not ready in {timeout_s:g} s (cluster.start_timeout_s); its logs are in "
                f"{self._log_path(self._plan.router).parent}"
            ) from None

    async def _start(self) -> ReadyCluster:
        self._actors = [self._place(plan) for plan in self._plan.actors]
        router_actor, *worker_actors = self._actors
        router, *started = await _first_error([self._call(actor, "start") for actor in self._actors])
        assert isinstance(router, RouterStarted), router
        workers = [
            ReadyWorker(
                worker_id=actor.plan.actor_id, role=actor.plan.role, pid=worker.pid, address=worker.address,
                epoch=worker.epoch,
            )
            for actor, worker in zip(worker_actors, started, strict=True)
        ]
        self._places = [WorkerPlace(worker_id=w.worker_id, role=w.role.value, address=w.address) for w in workers]
        await self._call(router_actor, "set_workers", self._places)
        self._deaths = {asyncio.ensure_future(self._death(actor)) for actor in self._actors}
        return ReadyCluster(router=router, workers=tuple(workers))

    async def stop(self, drain_s: float) -> None:
        """Ends all actors: the router first, so that nothing new comes; running requests may finish in `drain_s`."""
        router, *workers = self._actors
        for group in ([router], workers):
            await asyncio.gather(*(self._stop(actor, drain_s) for actor in group))

    async def _stop(self, actor: _Actor, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s + STOP_MARGIN_S):
                await self._call(actor, "stop", drain_s)
        except (PdRelayError, TimeoutError) as error:
            log.warning("%s did not stop by itself: %s", actor.plan.actor_id, error)

    def kill(self) -> None:
        """Ends the actors' processes, at once."""
        for actor in self._actors:
            ray.kill(actor.handle)
        for death in self._deaths:
            death.cancel()
        self._actors, self._deaths = [], set()

    async def next_death(self) -> str:
        """The id of the next actor that dies after the start. Each is told once."""
        assert self._deaths, "nobody is left to die"
        done, _ = await asyncio.wait(self._deaths, return_when=asyncio.FIRST_COMPLETED)
        death = next(iter(done))
        self._deaths.discard(death)
        return death.result()

    async def _death(self, actor: _Actor) -> str:
        try:
            await actor.handle.wait_for_death.remote()
        except RayError:
            if actor.plan.role is not Role.ROUTER:
                await self._tell_of_end(actor.plan.actor_id)
            return actor.plan.actor_id
        raise AssertionError(f"{actor.plan.actor_id} answered a call that never answers")

    async def _tell_of_end(self, worker_id: str) -> None:
        """So that the router lets nobody wait for a worker that is not started again."""
        self._places = [
            replace(place, is_expected=False) if place.worker_id == worker_id else place for place in self._places
        ]
        try:
            await self._call(self._actors[0], "set_workers", self._places)
        except PdRelayError as error:
            log.warning("the router could not be told that %s has ended: %s", worker_id, error.message)

    def _place(self, plan: ActorPlan) -> _Actor:
        cls = ray.remote(RouterActor if plan.role is Role.ROUTER else WorkerActor)
        options: dict[str, Any] = {
            "name": plan.actor_id, "num_cpus": plan.num_cpus, "max_restarts": 0, "max_task_retries": 0,
        }
        if plan.placement.label_selector:
            options["label_selector"] = dict(plan.placement.label_selector)
        if plan.placement.node_id is not None:
            options["scheduling_strategy"] = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                plan.placement.node_id, soft=False
            )
        placed = cls.options(**options)
        if plan.role is Role.ROUTER:
            handle = placed.remote(self._settings, secret=self._secret)
        else:
            handle = placed.remote(
                plan.role, self._settings, worker_id=plan.actor_id, host=self._host, secret=self._secret
            )
        return _Actor(plan=plan, handle=handle)

    async def _call(self, actor: _Actor, method: str, *args: Any) -> Any:
        """Raises:
        PdRelayError: that the actor answered with, or `Unavailable` if its process died.
        """
        try:
            answer = await getattr(actor.handle, method).remote(*args)
        except RayError as error:
            reason = str(error).strip().splitlines()[0]
            raise Unavailable(
                f"{actor.plan.actor_id} died ({reason}); its log: {self._log_path(actor.plan)}"
            ) from None
        if isinstance(answer, Failure):
            failure = answer.error()
            where = f"; log: {self._log_path(actor.plan)}" if isinstance(failure, Internal) else ""
            raise type(failure)(f"{actor.plan.actor_id}: {failure.message}{where}")
        return answer

    def _log_path(self, plan: ActorPlan) -> Path:
        return actor_log_path(self._settings.cluster.name, plan.actor_id)


def check_resources(plan: ClusterPlan) -> None:
    """Refuses a plan for which a joined Ray has no host or not enough free CPUs: Ray would wait in silence.

    Raises:
        InvalidArgument: labels or a node that no host has.
        ResourceExhausted: too few free CPUs.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    check_placeable(plan, {node["NodeID"]: node["Labels"] for node in nodes})
    free = ray.available_resources().get("CPU", 0.0)
    if free < plan.num_cpus:
        raise ResourceExhausted(
            f"the cluster needs {plan.num_cpus} CPUs of Ray, which has {free:g} free on {len(nodes)} hosts"
        )


async def _first_error(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order, or the first error as soon as it is there; the other calls are cancelled then."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
