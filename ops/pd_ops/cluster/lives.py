"""One life of a process: how it begins and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pd_engine.errors import DeadlineExceeded, PdRelayError
from pd_engine.service.secret import new_secret
from pd_engine.settings import Settings
from pd_ops.cluster.actors import RouterStarted, ServingAlready, WorkerPlace, WorkerStarted, actor_log_path
from pd_ops.cluster.members import Member, MemberState
from pd_ops.cluster.placed_actor import PlacedActor, place_actor
from pd_ops.cluster.plan import ActorPlan, Role
from pd_ops.cluster.restarts import RestartPacer, RestartPolicy

STOP_MARGIN_S = 3.0
NUM_QUESTIONS = 10  # whether a process is alive, in the time in which it must have answered one
T = TypeVar("T")

log = logging.getLogger(__name__)


class Lives:
    """Args:
    settings: the cluster's; what is started with others has them in its `Member`.
    host: that workers listen on; None: each on the address that Ray knows its host by.
    counts_cpus: whether Ray shall set CPUs aside for each process, or take as many as there come.
    """

    def __init__(self, settings: Settings, *, host: str | None, counts_cpus: bool) -> None:
        self.settings = settings
        self._host = host
        self._counts_cpus = counts_cpus
        self._secret = new_secret()
        self._policy = RestartPolicy(
            first_delay_s=settings.cluster.restart_delay_s, max_delay_s=settings.cluster.max_restart_delay_s
        )
        self._numbers: Counter[str] = Counter()

    def new_member(self, plan: ActorPlan, settings: Settings | None = None) -> Member:
        """`settings`: None: the cluster's."""
        return Member(plan=plan, settings=settings or self.settings, pacer=RestartPacer(self._policy))

    async def begin(self, member: Member, places: Sequence[WorkerPlace] = ()) -> None:
        """Starts its process, and returns when that serves.

        Args:
            places: of the workers that a router has when it opens its doors.

        Raises:
            PdRelayError: that it answered with; its process may still be there.
        """
        self._numbers[member.actor_id] += 1
        member.actor = place_actor(
            member.plan, member.settings, life=self._numbers[member.actor_id], host=self._host, secret=self._secret,
            counts_cpus=self._counts_cpus,
        )
        arguments = [list(places)] if member.role is Role.ROUTER else []
        self._note_serving(member, await member.actor.call("start", *arguments))

    def adopt(self, member: Member, actor: PlacedActor, life: int, found: ServingAlready) -> None:
        """Takes a process over that serves already, and the cluster's secret with it."""
        self._numbers[member.actor_id] = max(life, self._numbers[member.actor_id])
        self._secret = found.secret
        member.actor = actor
        self._note_serving(member, found.started)

    def _note_serving(self, member: Member, started: WorkerStarted | RouterStarted) -> None:
        member.started = started
        if isinstance(started, RouterStarted):
            member.settings = _with_ports(member.settings, started)
            self.settings = _with_ports(self.settings, started)
        member.pacer.note_serving(time.monotonic())
        member.move(MemberState.SERVING)

    async def until_ended(self, member: Member) -> str:
        """Returns when its process has ended, and why. One that answers nothing for `cluster.hang_timeout_s` is ended
        here: it would neither serve nor die."""
        actor, started = member.actor, member.started
        assert actor is not None and started is not None, member
        timeout_s = self.settings.cluster.hang_timeout_s
        ended = asyncio.ensure_future(actor.ended())
        try:
            while not ended.done():
                if not await _answers(actor, ended, timeout_s):
                    self._end_hanging(actor, started.pid)
                    await ended
                    return f"it answered nothing for {timeout_s:g} s, and was ended"
                await asyncio.wait({ended}, timeout=timeout_s / NUM_QUESTIONS)
            return "its process ended"
        finally:
            ended.cancel()

    def _end_hanging(self, actor: PlacedActor, pid: int) -> None:
        """Ray alone may leave a process that stands still as it is."""
        if not self._counts_cpus:  # on this host
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        actor.kill()

    async def in_time(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Raises:
        DeadlineExceeded: `work` was not done within `cluster.start_timeout_s`.
        """
        timeout_s = self.settings.cluster.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what} was not ready in {timeout_s:g} s (cluster.start_timeout_s); its logs are in "
                f"{self.log_path('router').parent}"
            ) from None

    async def finish(self, member: Member, method: str, drain_s: float) -> bool:
        """Lets it end by itself; `method` is how its actor is asked to. Whether all its requests had ended."""
        if member.actor is None:
            return True
        try:
            async with asyncio.timeout(drain_s + STOP_MARGIN_S):
                return await member.actor.call(method, drain_s) is not False
        except (PdRelayError, TimeoutError) as error:
            log.warning("%s did not stop by itself: %s", member.actor_id, error)
            return False

    def kill(self, member: Member) -> None:
        """Ends its process at once, if there is one."""
        if member.actor is not None:
            member.actor.kill()
        if member.state is not MemberState.ENDED:
            member.move(MemberState.ENDED)

    def log_path(self, actor_id: str) -> Path:
        return actor_log_path(self.settings.cluster.name, actor_id)

    def log_place(self, member: Member) -> str:
        """Its log file, and the host where that is if it may be another one."""
        path = self.log_path(member.actor_id)
        if not self.settings.cluster.by_pool or member.address is None:
            return str(path)
        return f"{path} on {member.address.rpartition(':')[0]}"

def _with_ports(settings: Settings, started: RouterStarted) -> Settings:
    """The next router listens where this one does, also if its ports were any free ones."""
    grpc_port, http_port = (int(one.rpartition(":")[2]) for one in (started.grpc_address, started.http_address))
    router = settings.router.model_copy(update={"grpc_port": grpc_port, "http_port": http_port})
    return settings.model_copy(update={"router": router})


async def _answers(actor: PlacedActor, ended: asyncio.Future[None], timeout_s: float) -> bool:
    """Whether it says something, or has ended, within that time."""
    answer = asyncio.ensure_future(actor.call("is_alive"))
    try:
        done, _ = await asyncio.wait({ended, answer}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
