"""Tells routers which workers there are."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from pd_engine.errors import PdRelayError
from pd_ops.cluster.actors import WorkerPlace, WorkerStarted
from pd_ops.cluster.members import Member, MemberState

log = logging.getLogger(__name__)


class Processes(Protocol):
    """Those that there are now."""

    @property
    def routers(self) -> tuple[Member, ...]: ...

    @property
    def workers(self) -> tuple[Member, ...]: ...


class RouterNews:
    """One message at a time, each with all workers: the last one counts."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._turn = asyncio.Lock()

    async def tell(self) -> None:
        """Raises:
        PdRelayError: of a worker that does not fit the others; the routers use the others.
        """
        async with self._turn:
            for router in self._processes.routers:
                if router.state in (MemberState.SERVING, MemberState.DRAINING):
                    await self.tell_one(router)

    async def tell_anyway(self) -> None:
        try:
            await self.tell()
        except PdRelayError as error:
            log.warning("the router could not be told its workers: %s", error.message)

    async def tell_one(self, router: Member) -> None:
        """Raises: as `tell`."""
        assert router.actor is not None, router
        await router.actor.call("set_workers", self.places())

    def places(self) -> list[WorkerPlace]:
        """Of all workers that serve, or have served."""
        return [
            WorkerPlace(
                worker_id=worker.actor_id, role=worker.role.value, address=worker.started.address,
                is_expected=worker.is_expected,
            )
            for worker in self._processes.workers
            if isinstance(worker.started, WorkerStarted)
        ]
