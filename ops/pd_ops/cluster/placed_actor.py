"""One process that Ray has placed: calls to it, its end."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from pd_engine.errors import Internal, Unavailable
from pd_engine.settings import Settings
from pd_ops.cluster.actors import Failure, RouterActor, WorkerActor, actor_log_path
from pd_ops.cluster.plan import ActorPlan, Role

ray: Any = importlib.import_module("ray")  # Any: it is typed in parts only


class PlacedActor:
    """One life of a process, by Ray's handle."""

    def __init__(self, plan: ActorPlan, log_path: Path, handle: Any) -> None:
        self.plan = plan
        self._log_path = log_path
        self._handle = handle

    async def call(self, method: str, *args: Any) -> Any:
        """Raises:
        PdRelayError: that the actor answered with, or `Unavailable` if its process died.
        """
        try:
            answer = await getattr(self._handle, method).remote(*args)
        except RayError as error:
            reason = str(error).strip().splitlines()[0]
            raise Unavailable(f"{self.plan.actor_id} died ({reason}); its log: {self._log_path}") from None
        if isinstance(answer, Failure):
            failure = answer.error()
            where = f"; log: {self._log_path}" if isinstance(failure, Internal) else ""
            raise type(failure)(f"{self.plan.actor_id}: {failure.message}{where}")
        return answer

    async def ended(self) -> None:
        """Returns when its process has ended."""
        try:
            await self._handle.wait_for_death.remote()
        except RayError:
            return
        raise AssertionError(f"{self.plan.actor_id} answered a call that never answers")

    def kill(self) -> None:
        """Ends its process at once."""
        ray.kill(self._handle)

    @property
    def log_path(self) -> Path:
        return self._log_path


def place_actor(
    plan: ActorPlan, settings: Settings, *, life: int, host: str | None, secret: str, counts_cpus: bool
) -> PlacedActor:
    """Starts a process.

    Args:
        life: 1 for the first process of this id.
        host: that a worker listens on; None: the address that Ray knows its host by.
        counts_cpus: whether Ray shall set CPUs aside for it.

    Raises:
        Unavailable: Ray does not answer.
    """
    cls = ray.remote(RouterActor if plan.role is Role.ROUTER else WorkerActor)
    placed = cls.options(**_options(plan, life, counts_cpus=counts_cpus, outlives=settings.cluster.by_pool))
    arguments: tuple[Any, ...] = (settings,)
    options: dict[str, Any] = {"secret": secret, "life": life}
    if plan.role is not Role.ROUTER:
        arguments = (plan.role, settings)
        options |= {"worker_id": plan.actor_id, "host": host}
    try:
        handle = placed.remote(*arguments, **options)
    except RayError as error:
        raise Unavailable(f"Ray cannot place {plan.actor_id}: {str(error).strip().splitlines()[0]}") from None
    return PlacedActor(plan, actor_log_path(settings.cluster.name, plan.actor_id), handle)


def find_actors(settings: Settings) -> dict[tuple[str, int], Any]:
    """Ray's handles of this cluster's processes that an earlier controller has started, by id and life."""
    found = {}
    for name in ray.util.list_named_actors():
        actor_id, _, life = name.partition(".")
        try:
            found[actor_id, int(life or 1)] = ray.get_actor(name)
        except ValueError:  # it has ended meanwhile
            continue
    return found


def _options(plan: ActorPlan, life: int, *, counts_cpus: bool, outlives: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        # A name is free again only when Ray has seen its bearer's end, so every life has its own.
        "name": plan.actor_id if life == 1 else f"{plan.actor_id}.{life}",
        "num_cpus": plan.num_cpus if counts_cpus else 0, "max_restarts": 0, "max_task_retries": 0,
    }
    if outlives:
        options["lifetime"] = "detached"
    if plan.placement.label_selector:
        options["label_selector"] = dict(plan.placement.label_selector)
    if plan.placement.node_id is not None:
        options["scheduling_strategy"] = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            plan.placement.node_id, soft=False
        )
    return options
