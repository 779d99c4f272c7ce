"""Starts, watches, replaces and ends the processes of one cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pd_engine.errors import PdRelayError
from pd_engine.settings import Settings
from pd_ops.cluster.actors import RouterStarted
from pd_ops.cluster.events import ClusterEvent, EventKind
from pd_ops.cluster.lives import Lives
from pd_ops.cluster.members import Member, MemberState
from pd_ops.cluster.plan import WORKER_ROLES, ActorPlan, ClusterPlan, Role
from pd_ops.cluster.ready import ReadyCluster, life_details, ready_worker
from pd_ops.cluster.router_news import RouterNews

if TYPE_CHECKING:
    from pd_ops.cluster.adoption import Found

T = TypeVar("T")

log = logging.getLogger(__name__)


class Controller:
    """The processes of one cluster. What dies is started again (`cluster.restart`), in a new life of the same id.

    Needs a connected Ray, whose own processes it does not end. Everything happens in one event loop.

    Args:
        host, counts_cpus: see `Lives`.

    Attributes:
        plan: what the cluster was started with.
        events: what has become of processes since the start, in order.
    """

    def __init__(self, settings: Settings, plan: ClusterPlan, *, host: str | None, counts_cpus: bool) -> None:
        self.plan = plan
        self.events: asyncio.Queue[ClusterEvent] = asyncio.Queue()
        self._lives = Lives(settings, host=host, counts_cpus=counts_cpus)
        self._router = self._lives.new_member(plan.router)
        self._leaving_routers: list[Member] = []
        self._workers = {plan.actor_id: self._lives.new_member(plan) for plan in plan.workers}
        self._watches: dict[int, asyncio.Task[None]] = {}  # by the id() of a member
        self._news = RouterNews(self)

    @property
    def settings(self) -> Settings:
        """As they were given, but with the ports that the router has."""
        return self._lives.settings

    def use_settings(self, settings: Settings) -> None:
        """For members that are new from now on; sizes and places stay those of the plan."""
        self._lives.settings = settings

    @property
    def router(self) -> Member:
        return self._router

    @property
    def routers(self) -> tuple[Member, ...]:
        """The router, and those that end their last streams."""
        return (self._router, *self._leaving_routers)

    @property
    def workers(self) -> tuple[Member, ...]:
        return tuple(self._workers.values())

    # Start and end of all

    def adopt(self, found: Sequence[Found]) -> list[ActorPlan]:
        """Takes processes over, before the start: those that are planned, and workers beyond them. What is still to
        be started."""
        for one in found:
            member = self._router
            if one.plan.role is not Role.ROUTER:
                member = self._workers.setdefault(one.plan.actor_id, self._lives.new_member(one.plan))
            self._lives.adopt(member, one.actor, one.life, one.serving)
        for role in WORKER_ROLES:
            self._leave_out(role, self.plan.size(role))
        return [
            member.plan for member in (self._router, *self._workers.values()) if member.state is MemberState.STARTING
        ]

    def _leave_out(self, role: Role, size: int) -> None:
        """Workers that are not started yet, where others serve in their stead."""
        workers = [worker for worker in self._workers.values() if worker.role is role]
        unstarted = [worker for worker in workers if worker.state is MemberState.STARTING]
        num_kept = max(0, len(unstarted) - max(0, len(workers) - size))
        for worker in unstarted[num_kept:]:
            del self._workers[worker.actor_id]

    async def start(self) -> ReadyCluster:
        """Places all processes at once that do not serve yet, waits until all do, and tells the router its workers.

        Raises:
            PdRelayError: of the first that failed, whose name and log stand in the message.
            DeadlineExceeded: not ready in time (`cluster.start_timeout_s`).
        """
        members = [self._router, *self._workers.values()]
        begins = [self._lives.begin(member) for member in members if member.state is MemberState.STARTING]
        await self._lives.in_time("the cluster", _first_error(begins))
        await self._news.tell()
        for member in members:
            self._watch(member)
        assert isinstance(self._router.started, RouterStarted), self._router
        return ReadyCluster(router=self._router.started, workers=tuple(map(ready_worker, self._workers.values())))

    async def stop(self, drain_s: float) -> None:
        """Ends all: the router first, so that nothing new comes; running requests may finish in `drain_s`."""
        self._end_watches()
        for group in ([self._router], list(self._workers.values())):
            await asyncio.gather(*(self._lives.finish(member, "stop", drain_s) for member in group))

    def kill(self) -> None:
        """Ends all processes, at once."""
        self._end_watches()
        for member in [*self.routers, *self._workers.values()]:
            self._lives.kill(member)

    # One process more, or less

    async def add_worker(self, plan: ActorPlan, settings: Settings | None = None) -> Member:
        """Returns when the new worker serves and the router has it. `settings`: its own; None: the cluster's.

        Raises:
            PdRelayError: it did not start, or does not fit the others; nothing is left of it.
        """
        assert plan.actor_id not in self._workers, plan.actor_id
        member = self._workers[plan.actor_id] = self._lives.new_member(plan, settings)
        try:
            await self._lives.in_time(plan.actor_id, self._lives.begin(member))
            await self._news.tell()
        except BaseException:
            self._lives.kill(member)
            del self._workers[plan.actor_id]
            await self._news.tell_anyway()
            raise
        self._watch(member)
        self._announce(EventKind.ADDED, member, f"added: {plan.actor_id} serves", **life_details(member))
        return member

    async def remove_worker(self, member: Member, drain_s: float) -> bool:
        """Ends a worker: it gets nothing new, its requests may finish and its blocks be fetched for `drain_s`; what is
        left then goes on elsewhere. Whether nothing was left."""
        self._end_watch(member)
        is_drained = True
        if member.state is MemberState.SERVING:
            member.move(MemberState.DRAINING)
            await self._news.tell_anyway()
            is_drained = await self._lives.finish(member, "stop", drain_s)
        self._lives.kill(member)
        del self._workers[member.actor_id]
        await self._news.tell_anyway()
        self._announce(EventKind.REMOVED, member, f"removed: {member.actor_id} has ended", drained=is_drained)
        return is_drained

    async def replace_router(self, drain_s: float, settings: Settings | None = None) -> bool:
        """Starts another router on the same ports, and ends the one before: its streams may go on for `drain_s`.
        Whether none was left. `settings`: as in `add_worker`.

        Raises:
            PdRelayError: the new one did not start; the one before serves on.
        """
        before = self._router
        # For a while there are two: a host that Ray gives one CPU has room for the one that leaves alone. It stays so:
        # that CPU may be somebody else's by the time the new one dies and is started again.
        after = self._lives.new_member(replace(before.plan, num_cpus=0), settings)
        try:
            await self._lives.in_time("the new router", self._begin(after))
        except BaseException:
            self._lives.kill(after)
            raise
        self._end_watch(before)
        self._router = after
        self._leaving_routers.append(before)
        self._watch(after)
        await self._news.tell_anyway()  # what has changed since it was told, when it was none of the routers yet
        is_drained = before.state is MemberState.SERVING
        if is_drained:
            before.move(MemberState.DRAINING)
            is_drained = await self._lives.finish(before, "hand_over", drain_s)
        self._lives.kill(before)
        self._leaving_routers.remove(before)
        self._announce(
            EventKind.RESTARTED, after, "restarted: the router was replaced", drained=is_drained, **life_details(after)
        )
        return is_drained

    # Watching

    def _watch(self, member: Member) -> None:
        self._watches[id(member)] = asyncio.create_task(self._keep_alive(member), name=f"watch {member.actor_id}")

    def _end_watch(self, member: Member) -> None:
        watch = self._watches.pop(id(member), None)
        if watch is not None:
            watch.cancel()

    def _end_watches(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        self._watches = {}

    async def _keep_alive(self, member: Member) -> None:
        while True:
            await self._note_end(member, await self._lives.until_ended(member))
            if member.state is MemberState.ENDED:
                return
            await self._begin_again(member)

    async def _note_end(self, member: Member, why: str) -> None:
        member.last_end = why
        restarts = self.settings.cluster.restart
        member.move(MemberState.WAITING if restarts else MemberState.ENDED)
        self._announce(
            EventKind.LOST, member,
            f"lost: {member.actor_id}: {why}; its log is {self._lives.log_place(member)}; "
            f"{'it is started again' if restarts else 'it is not started again (cluster.restart)'}",
            restarts=restarts,
        )
        await self._news.tell_anyway()

    async def _begin_again(self, member: Member) -> None:
        """Tries until it serves."""
        while member.state is not MemberState.SERVING:
            await asyncio.sleep(member.pacer.next_delay_s(time.monotonic()))
            member.move(MemberState.STARTING)
            member.num_restarts += 1
            try:
                await self._lives.in_time(member.actor_id, self._begin(member))
                await self._news.tell()
            except PdRelayError as error:
                await self._note_failed_start(member, error)
        self._announce(
            EventKind.RESTARTED, member, f"restarted: {member.actor_id} serves again", **life_details(member)
        )

    async def _begin(self, member: Member) -> None:
        if member.role is not Role.ROUTER:
            await self._lives.begin(member)
            return
        await self._lives.begin(member, self._news.places())
        await self._news.tell_one(member)  # what has changed meanwhile

    async def _note_failed_start(self, member: Member, error: PdRelayError) -> None:
        if member.state is MemberState.SERVING:  # and a worker does not fit the others: the router says so, and waits
            log.warning("%s: %s", member.actor_id, error.message)
            return
        assert member.actor is not None, member
        member.actor.kill()
        member.last_end = error.message
        member.move(MemberState.WAITING)
        sentence = f"not started: {member.actor_id}: {error.message}; it is tried again"
        self._announce(EventKind.START_FAILED, member, sentence, message=error.message)
        await self._news.tell_anyway()

    def _announce(self, kind: EventKind, member: Member, sentence: str, **details: Any) -> None:
        self.events.put_nowait(
            ClusterEvent(kind=kind, actor_id=member.actor_id, sentence=sentence, details=details)
        )


async def _first_error(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order, or the first error as soon as it is there; the other calls are cancelled then."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
