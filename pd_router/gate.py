"""Where journeys wait for their turn: the event loop around `Admission` and its line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from pd_engine.errors import PdRelayError
from pd_router.admission import Admission
from pd_router.choice_group import ChoiceGroup
from pd_router.placement import Placement
from pd_router.pools import PlacementRequest
from pd_router.registry import Registry
from pd_router.targets import Targets
from pd_router.waiting_line import Waiter


class _Recovery:
    """How long a journey may still wait for a worker: from the look at which it first may."""

    def __init__(self, group: ChoiceGroup, wait_s: float, has_failed: bool) -> None:
        self._group = group
        self._wait_s = wait_s
        self._has_failed = has_failed
        self._until_s: float | None = None

    def left_s(self, now_s: float) -> float:
        """Not above 0: it may not wait."""
        if self._until_s is None:
            if not (self._has_failed or self._group.has_begun):
                return 0.0
            self._until_s = now_s + self._wait_s
        return self._until_s - now_s


class RoomGate:
    """Places journeys; one that finds no room waits, and others wait behind it."""

    def __init__(self, registry: Registry, admission: Admission) -> None:
        self._registry = registry
        self._admission = admission
        self._calls: dict[Waiter, asyncio.Event] = {}  # of those that wait: set when it is their turn, or they must go

    async def place(
        self, wanted: Callable[[], PlacementRequest], waiter: Waiter, targets: Targets | None, *,
        recovery_wait_s: float, has_failed: bool = False,
    ) -> Placement:
        """The pair for one attempt. The caller takes its blocks before it next awaits.

        Args:
            wanted: what is to be placed, asked at every look: what is known of workers changes while it waits.
            waiter: refused with its whole group, as long as none of that has begun.
            targets: by the event loop's clock, until the group has begun; None: whenever, however slowly.
            recovery_wait_s: how long to wait for an expected worker to become ready, once the group has begun.
            has_failed: an attempt has, so it waits for such a worker in any case.

        Raises:
            Unavailable, InvalidArgument, NotFound: there is no such worker, now or ever. Lack of room alone raises
                nothing.
            ResourceExhausted: it would come too late, or too many wait.
        """
        group = waiter.group
        _check_refused(group)
        try:
            recovery = _Recovery(group, recovery_wait_s, has_failed)
            return await self._place(wanted, waiter, None if group.has_begun else targets, recovery)
        except PdRelayError as error:
            self._refuse(group, error)
            raise

    def leave(self) -> None:
        """A journey that was let in has ended."""
        self._admission.free_seat()
        self._registry.note_room()

    async def _place(
        self, wanted: Callable[[], PlacementRequest], waiter: Waiter, targets: Targets | None, recovery: _Recovery
    ) -> Placement:
        now_s = asyncio.get_running_loop().time()
        request = wanted()
        snapshot = self._registry.snapshot(request.block_hashes)
        arrival = self._admission.arrive(
            waiter, request, snapshot, targets, now_s, may_recover=recovery.left_s(now_s) > 0
        )
        if arrival.placement is not None:
            return arrival.placement
        self._calls[waiter] = asyncio.Event()
        if arrival.displaced is not None:
            self._refuse(arrival.displaced.group, self._admission.displacement())
        self._call_head()
        try:
            return await self._wait_in_time(wanted, waiter, targets, recovery)
        finally:
            self._admission.leave(waiter)
            del self._calls[waiter]
            self._call_head()

    async def _wait_in_time(
        self, wanted: Callable[[], PlacementRequest], waiter: Waiter, targets: Targets | None, recovery: _Recovery
    ) -> Placement:
        due_s = None if targets is None or targets.ttft_ms is None else targets.begun_s + targets.ttft_ms / 1000
        try:
            async with asyncio.timeout_at(due_s):
                return await self._wait(wanted, waiter, targets, recovery)
        except TimeoutError:
            assert targets is not None
            if not waiter.group.has_begun:
                raise targets.missed() from None
        return await self._wait(wanted, waiter, None, recovery)

    async def _wait(
        self, wanted: Callable[[], PlacementRequest], waiter: Waiter, targets: Targets | None, recovery: _Recovery
    ) -> Placement:
        loop = asyncio.get_running_loop()
        while True:
            await self._my_turn(waiter)
            recovery_s = recovery.left_s(loop.time())
            request = wanted()
            placement = self._admission.turn(
                waiter, request, self._registry.snapshot(request.block_hashes),
                None if waiter.group.has_begun else targets, loop.time(), may_recover=recovery_s > 0,
            )
            if placement is not None:
                return placement
            await self._change(recovery_s if recovery_s > 0 else None)

    async def _my_turn(self, waiter: Waiter) -> None:
        """Raises:
        PdRelayError: it was refused with another one of its group.
        """
        called = self._calls[waiter]
        _check_refused(waiter.group)
        while self._admission.line.head is not waiter:
            called.clear()
            await called.wait()
            _check_refused(waiter.group)

    def _refuse(self, group: ChoiceGroup, error: PdRelayError) -> None:
        """And those of it that wait have to go."""
        group.refuse(error)
        for waiter, called in self._calls.items():
            if waiter.group is group:
                called.set()

    async def _change(self, timeout_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._registry.wait_change()

    def _call_head(self) -> None:
        head = self._admission.line.head
        if head is not None:
            self._calls[head].set()


def _check_refused(group: ChoiceGroup) -> None:
    if group.error is not None:
        raise group.error
