"""What an operator may ask of a running cluster: other sizes, a worker less, all of it new, a worker in the other pool.

One operation at a time. Each goes in steps, and every step leaves a cluster that serves; an operation whose caller has
gone away finishes the step that it is in, and begins no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from pd_engine.errors import FailedPrecondition, InvalidArgument, NotFound, PdRelayError, ResourceExhausted
from pd_engine.settings import Settings
from pd_ops.cluster.control_messages import (
    DrainRequest,
    Request,
    RoleRequest,
    RollRequest,
    ScaleRequest,
    SettingsRequest,
    SpoilRequest,
    StatusRequest,
)
from pd_ops.cluster.members import Member, MemberState
from pd_ops.cluster.other_settings import changed_settings
from pd_ops.cluster.plan import WORKER_ROLES, ActorPlan, ClusterPlan, Role

Document = dict[str, Any]
LEAVING = (MemberState.DRAINING, MemberState.ENDED)
ROOM_RETURNS_S = 10.0  # Ray counts the CPUs of a process that has ended as free some time later
ROOM_POLL_S = 0.1


class Fleet(Protocol):
    """The processes, as `Controller` has them."""

    plan: ClusterPlan

    @property
    def settings(self) -> Settings: ...

    @property
    def router(self) -> Member: ...

    @property
    def workers(self) -> tuple[Member, ...]: ...

    def use_settings(self, settings: Settings) -> None: ...

    async def add_worker(self, plan: ActorPlan, settings: Settings | None = None) -> Member: ...

    async def remove_worker(self, member: Member, drain_s: float) -> bool: ...

    async def replace_router(self, drain_s: float, settings: Settings | None = None) -> bool: ...


class Caller:
    """Who asked for an operation.

    Attributes:
        has_left: set when nobody waits for its end any more.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.has_left = asyncio.Event()


class Operations:
    """Args:
    check_room: raises ResourceExhausted if there is no room for further workers of these roles, one each.
    list_hosts: those that processes may be placed on, as `status` shows them; none where all are on this host.
    """

    def __init__(
        self, fleet: Fleet, check_room: Callable[[Sequence[Role]], None],
        list_hosts: Callable[[], list[Document]] = list,
    ) -> None:
        self._fleet = fleet
        self._check_room = check_room
        self._list_hosts = list_hosts
        self._under_way: str | None = None
        self._room_may_come_until_s = 0.0  # of the monotonic clock

    async def run(self, request: Request, caller: Caller) -> Document:
        """Raises:
        PdRelayError: it cannot be done; steps that were done by then stand.
        """
        match request:
            case StatusRequest():
                return self._status()
            case SettingsRequest():
                return self._fleet.settings.model_dump(mode="json")
            case SpoilRequest():
                return await self._spoil(request)
        if self._under_way is not None:
            raise FailedPrecondition(f"`{self._under_way}` is under way in this cluster; one operation at a time")
        self._under_way = request.command
        try:
            match request:
                case ScaleRequest():
                    return await self._scale(request, caller)
                case DrainRequest():
                    return await self._drain(request, caller)
                case RoleRequest():
                    return await self._role(request, caller)
                case RollRequest():
                    return await self._roll(request, caller)
        finally:
            self._under_way = None

    def _status(self) -> Document:
        return {
            "router": self._fleet.router.to_json(),
            "workers": [worker.to_json() for worker in self._fleet.workers],
            "hosts": self._list_hosts(), "operation": self._under_way,
        }

    async def _spoil(self, request: SpoilRequest) -> Document:
        if not self._fleet.settings.cluster.drillable:
            raise FailedPrecondition("the cluster is not marked as drillable (cluster.drillable)")
        worker = self._worker(request.worker)
        if worker.actor is None or worker.state is not MemberState.SERVING:
            raise FailedPrecondition(f"{request.worker} is {worker.state.value}")
        return {"worker": request.worker, "to_come": await worker.actor.call("spoil", request.pieces)}

    async def _scale(self, request: ScaleRequest, caller: Caller) -> Document:
        wanted = request.wanted()
        if not wanted:
            raise InvalidArgument("give at least one pool its size, as in prefill=2 decode=3")
        new = [role for role, size in wanted.items() for _ in range(size - len(self._pool(role)))]
        added = await self._add(new, caller)
        leaving = [worker for role, size in wanted.items() for worker in _last_first(self._pool(role))[: -size or None]]
        interrupted = caller.has_left.is_set() and bool(leaving)
        removed = {} if interrupted else await self._remove(leaving, request.drain_s, caller)
        return {"added": [worker.actor_id for worker in added], "removed": removed, "interrupted": interrupted,
                "pools": self._sizes()}

    async def _drain(self, request: DrainRequest, caller: Caller) -> Document:
        worker = self._spare_worker(request.worker)
        removed = await self._remove([worker], request.drain_s, caller)
        return {"worker": request.worker, "drained": removed[request.worker], "pools": self._sizes()}

    async def _role(self, request: RoleRequest, caller: Caller) -> Document:
        worker = self._spare_worker(request.worker)
        role = Role(request.role)
        if worker.role is role:
            raise InvalidArgument(f"{request.worker} is a {role.value} worker")
        [new] = await self._add([role], caller)
        removed = await self._remove([worker], request.drain_s, caller)
        return {"worker": request.worker, "replaced_by": new.actor_id, "drained": removed[request.worker],
                "pools": self._sizes()}

    async def _roll(self, request: RollRequest, caller: Caller) -> Document:
        """Other settings become the cluster's when all processes serve with them: each has its own until then."""
        settings = changed_settings(self._fleet.settings, request.settings)
        replaced: list[Document] = []
        try:
            interrupted = await self._replace_all(request.drain_s, settings, caller, replaced)
        except PdRelayError as error:
            if not (request.settings and replaced):
                raise
            new = _listed(one["by"] for one in replaced)
            raise type(error)(f"{error.message}; the cluster keeps its settings, and {new} the new ones") from error
        if not interrupted:
            self._fleet.use_settings(settings)
        return {"replaced": replaced, "interrupted": interrupted}

    async def _replace_all(
        self, drain_s: float, settings: Settings, caller: Caller, replaced: list[Document]
    ) -> bool:
        """Whether the caller left before the end. `replaced`: gets what has been."""
        for worker in [worker for role in WORKER_ROLES for worker in self._pool(role)]:
            if caller.has_left.is_set():
                return True
            if worker.state in LEAVING:
                continue
            replaced.append(await self._replace(worker, drain_s, settings, caller))
        if caller.has_left.is_set():
            return True
        caller.tell("replacing the router")
        is_drained = await self._fleet.replace_router(drain_s, settings)
        router_id = self._fleet.router.actor_id
        replaced.append({"id": router_id, "by": router_id, "drained": is_drained})
        return False

    # Steps

    async def _replace(self, worker: Member, drain_s: float, settings: Settings, caller: Caller) -> Document:
        """Its substitute serves before it goes; where there is no room for both, it goes first, if others serve.

        Raises:
            ResourceExhausted: there is no room, and nobody else in its pool serves.
        """
        try:
            [new] = await self._add([worker.role], caller, settings)
        except ResourceExhausted as error:
            if not self._others_serve(worker):
                raise
            caller.tell(f"no room for one worker more ({error.message}): {worker.actor_id} goes first")
            removed = await self._remove([worker], drain_s, caller)
            new = await self._add_in_its_place(worker, settings, caller)
        else:
            removed = await self._remove([worker], drain_s, caller)
        return {"id": worker.actor_id, "by": new.actor_id, "drained": removed[worker.actor_id]}

    async def _add_in_its_place(self, worker: Member, settings: Settings, caller: Caller) -> Member:
        """Of one that has gone. If that does not start, one with the settings that it had does, and the error is
        raised."""
        try:
            [new] = await self._add([worker.role], caller, settings)
        except PdRelayError as error:
            caller.tell(f"not started: {error.message}; another one is, with the settings before")
            self._room_may_come_until_s = time.monotonic() + ROOM_RETURNS_S
            [new] = await self._add([worker.role], caller, worker.settings)
            raise type(error)(f"{error.message}; {new.actor_id} took its place, with the settings before") from error
        return new

    async def _add(
        self, roles: Sequence[Role], caller: Caller, settings: Settings | None = None
    ) -> list[Member]:
        """All at once. `settings`: None: the cluster's. Raises the first error, if one does not start; the others are
        there then."""
        if not roles:
            return []
        await self._wait_for_room(roles)
        taken = [worker.actor_id for worker in self._fleet.workers]
        plans: list[ActorPlan] = []
        for role in roles:
            plans.append(self._fleet.plan.another(role, [*taken, *(plan.actor_id for plan in plans)]))
        caller.tell(f"starting {_listed(plan.actor_id for plan in plans)}")
        starts = [self._fleet.add_worker(plan, settings) for plan in plans]
        results = await asyncio.gather(*starts, return_exceptions=True)
        for error in results:
            if isinstance(error, PdRelayError):
                sizes = ", ".join(f"{name}={size}" for name, size in self._sizes().items())
                raise type(error)(f"{error.message}; the cluster has {sizes}")
            if isinstance(error, BaseException):
                raise error
        return [member for member in results if isinstance(member, Member)]

    async def _wait_for_room(self, roles: Sequence[Role]) -> None:
        """Not longer than it may take until what a removed worker had is free again.

        Raises:
            ResourceExhausted: there is too little room for these.
        """
        while True:
            try:
                return self._check_room(roles)
            except ResourceExhausted:
                if time.monotonic() >= self._room_may_come_until_s:
                    raise
            await asyncio.sleep(ROOM_POLL_S)

    async def _remove(self, workers: Sequence[Member], drain_s: float, caller: Caller) -> dict[str, bool]:
        """All at once. By id, whether nothing was left there that had to go on elsewhere."""
        if not workers:
            return {}
        caller.tell(f"draining {_listed(worker.actor_id for worker in workers)} (at most {drain_s:g} s)")
        drained = await asyncio.gather(*(self._fleet.remove_worker(worker, drain_s) for worker in workers))
        self._room_may_come_until_s = time.monotonic() + ROOM_RETURNS_S
        return {worker.actor_id: is_drained for worker, is_drained in zip(workers, drained, strict=True)}

    # Questions

    def _others_serve(self, worker: Member) -> bool:
        """In its pool."""
        others = [other for other in self._pool(worker.role) if other is not worker]
        return any(other.state is MemberState.SERVING for other in others)

    def _pool(self, role: Role) -> list[Member]:
        """Its workers that have not been told to end."""
        return [worker for worker in self._fleet.workers if worker.role is role and worker.state not in LEAVING]

    def _sizes(self) -> dict[str, int]:
        return {role.value: len(self._pool(role)) for role in WORKER_ROLES}

    def _worker(self, worker_id: str) -> Member:
        """Raises:
        NotFound: there is no such worker.
        """
        known = {worker.actor_id: worker for worker in self._fleet.workers if worker.state not in LEAVING}
        if worker_id not in known:
            raise NotFound(f"the cluster has no worker {worker_id!r}; it has {_listed(known)}")
        return known[worker_id]

    def _spare_worker(self, worker_id: str) -> Member:
        """Raises:
        NotFound: there is no such worker.
        FailedPrecondition: its pool would have nobody who serves.
        """
        worker = self._worker(worker_id)
        if not self._others_serve(worker):
            raise FailedPrecondition(
                f"{worker_id} is the last {worker.role.value} worker that serves; give its pool another one first: "
                f"pd-relay scale {worker.role.value}={len(self._pool(worker.role)) + 1}"
            )
        return worker


def _last_first(pool: Sequence[Member]) -> list[Member]:
    """In the order in which they are to go: those that do not serve, then those with the highest numbers."""
    def number(worker: Member) -> int:
        return int(worker.actor_id.rpartition("-")[2])

    return sorted(pool, key=lambda worker: (worker.state is MemberState.SERVING, -number(worker)))


def _listed(ids: Iterable[str]) -> str:
    return ", ".join(ids)
