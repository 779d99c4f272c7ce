"""Where journeys wait for room: in order of arrival, so that a large one is not passed by for ever."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from pd_engine.errors import InvalidArgument, NotFound, PdRelayError, Unavailable
from pd_router.admission import TtftTarget
from pd_router.explanation import explain
from pd_router.placement import Placement, Refusal, RefusalKind, place
from pd_router.pools import PlacementRequest
from pd_router.registry import Registry

NO_WORKER_RETRY_MS = 1_000


def refusal_error(refusal: Refusal) -> PdRelayError:
    """What a client is told that is not kept waiting."""
    if refusal.kind is RefusalKind.NEVER:
        return InvalidArgument(f"the request can never be placed: {explain(refusal)}")
    if refusal.kind is RefusalKind.UNKNOWN:
        return NotFound(f"the request cannot be placed: {explain(refusal)}")
    return Unavailable(f"the request cannot be placed: {explain(refusal)}", retry_after_ms=NO_WORKER_RETRY_MS)


class RoomGate:
    """Places journeys; one that finds no room waits, and those after it wait behind it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._turn = asyncio.Lock()

    async def place(
        self, request: PlacementRequest, *, recovery_wait_s: float, first_token: TtftTarget | None = None
    ) -> Placement:
        """The pair for one attempt. The caller takes its blocks before it next awaits.

        Args:
            recovery_wait_s: how long to wait for an expected worker to become ready; 0: not at all.
            first_token: when it is due, by the event loop's clock; None: whenever it comes.

        Raises:
            Unavailable, InvalidArgument, NotFound: there is no such worker, now or ever. Lack of room alone raises
                nothing.
            ResourceExhausted: the first token would come too late.
        """
        if first_token is None:
            return await self._place(request, recovery_wait_s, None)
        now_s = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(max(0.0, first_token.remaining_s(now_s()))):
                placement = await self._place(request, recovery_wait_s, first_token)
        except TimeoutError:
            raise first_token.missed() from None
        if self._registry.knows_prefill_speed:
            first_token.check(placement, now_s())
        return placement

    async def _place(
        self, request: PlacementRequest, recovery_wait_s: float, first_token: TtftTarget | None
    ) -> Placement:
        decision = self._decide(request, first_token)
        if isinstance(decision, Placement) and not self._turn.locked():
            return decision
        if isinstance(decision, Refusal):
            self._check(decision, may_recover=recovery_wait_s > 0)
        deadline_s = asyncio.get_running_loop().time() + recovery_wait_s
        async with self._turn:
            while True:
                decision = self._decide(request, first_token)
                if isinstance(decision, Placement):
                    return decision
                remaining_s = deadline_s - asyncio.get_running_loop().time()
                self._check(decision, may_recover=remaining_s > 0)
                await self._wait(remaining_s if decision.kind is RefusalKind.NO_WORKER else None)

    def _decide(self, request: PlacementRequest, first_token: TtftTarget | None) -> Placement | Refusal:
        if first_token is not None and self._registry.knows_prefill_speed:
            within_ms = 1000 * first_token.remaining_s(asyncio.get_running_loop().time())
            request = replace(request, first_token_within_ms=within_ms)
        return place(request, self._registry.snapshot(request.block_hashes))

    @staticmethod
    def _check(refusal: Refusal, *, may_recover: bool) -> None:
        if refusal.kind is RefusalKind.NO_ROOM or (refusal.kind is RefusalKind.NO_WORKER and may_recover):
            return
        raise refusal_error(refusal)

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._registry.wait_change(), timeout_s)
        except TimeoutError:
            return
