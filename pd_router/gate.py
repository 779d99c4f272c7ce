"""Where journeys wait for their turn: the event loop around `Admission` and its line."""

from __future__ import annotations

import asyncio

from pd_router.admission import Admission
from pd_router.placement import Placement
from pd_router.pools import PlacementRequest
from pd_router.registry import Registry
from pd_router.targets import Targets
from pd_router.waiting_line import Waiter


class RoomGate:
    """Places journeys; one that finds no room waits, and others wait behind it."""

    def __init__(self, registry: Registry, admission: Admission) -> None:
        self._registry = registry
        self._admission = admission
        self._calls: dict[Waiter, asyncio.Event] = {}  # of those that wait: set when it is their turn, or they must go
        self._displaced: set[Waiter] = set()

    async def place(
        self, request: PlacementRequest, waiter: Waiter, targets: Targets | None, *, recovery_wait_s: float = 0.0
    ) -> Placement:
        """The pair for one attempt. The caller takes its blocks before it next awaits.

        Args:
            targets: by the event loop's clock; None: whenever, however slowly.
            recovery_wait_s: how long to wait for an expected worker to become ready; 0: not at all.

        Raises:
            Unavailable, InvalidArgument, NotFound: there is no such worker, now or ever. Lack of room alone raises
                nothing.
            ResourceExhausted: it would come too late, or too many wait.
        """
        now_s = asyncio.get_running_loop().time()
        snapshot = self._registry.snapshot(request.block_hashes)
        arrival = self._admission.arrive(
            waiter, request, snapshot, targets, now_s, may_recover=recovery_wait_s > 0
        )
        if arrival.placement is not None:
            return arrival.placement
        self._calls[waiter] = asyncio.Event()
        if arrival.displaced is not None:
            self._displaced.add(arrival.displaced)
            self._calls[arrival.displaced].set()
        self._call_head()
        due_s = None if targets is None or targets.ttft_ms is None else targets.begun_s + targets.ttft_ms / 1000
        try:
            async with asyncio.timeout_at(due_s):
                return await self._wait(request, waiter, targets, now_s + recovery_wait_s)
        except TimeoutError:
            assert targets is not None
            raise targets.missed() from None
        finally:
            self._admission.leave(waiter)
            self._displaced.discard(waiter)
            del self._calls[waiter]
            self._call_head()

    def leave(self) -> None:
        """A journey that was let in has ended."""
        self._admission.free_seat()
        self._registry.note_room()

    async def _wait(
        self, request: PlacementRequest, waiter: Waiter, targets: Targets | None, recover_until_s: float
    ) -> Placement:
        loop = asyncio.get_running_loop()
        while True:
            await self._my_turn(waiter)
            recovery_s = recover_until_s - loop.time()
            placement = self._admission.turn(
                waiter, request, self._registry.snapshot(request.block_hashes), targets, loop.time(),
                may_recover=recovery_s > 0,
            )
            if placement is not None:
                return placement
            await self._change(recovery_s if recovery_s > 0 else None)

    async def _my_turn(self, waiter: Waiter) -> None:
        """Raises:
        ResourceExhausted: it has to go for another one.
        """
        called = self._calls[waiter]
        while self._admission.line.head is not waiter or waiter in self._displaced:
            if waiter in self._displaced:
                raise self._admission.displacement()
            called.clear()
            await called.wait()

    async def _change(self, timeout_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._registry.wait_change(), timeout_s)
        except TimeoutError:
            return

    def _call_head(self) -> None:
        head = self._admission.line.head
        if head is not None:
            self._calls[head].set()

