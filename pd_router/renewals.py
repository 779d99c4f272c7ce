"""What keeps alive what journeys hold at a worker, and finds what the worker has lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from pd_engine.contracts import worker_pb2 as pb
from pd_router.worker_calls import LateAnswer

if TYPE_CHECKING:
    from pd_router.link import WorkerLink

MAX_JOURNEYS_A_RENEWAL = 5_000


class Renewals:
    """Of one connection to a worker: a new one begins with nothing said.

    A journey counts as gone when two renewals in a row say so: its end may be on its way in another stream.
    """

    def __init__(self, link: WorkerLink, *, interval_s: float) -> None:
        self._link = link
        self._interval_s = interval_s
        self._gone_before: set[str] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            passengers = list(self._link.passengers.values())
            refs = [ref for passenger in passengers if (ref := passenger.renewable(self._link)) is not None]
            with contextlib.suppress(LateAnswer):
                self._gone_before = await self._renew_all(refs)

    async def _renew_all(self, refs: list[pb.JourneyRef]) -> set[str]:
        """Those that the worker says are gone, for the first time."""
        gone: set[str] = set()
        for start in range(0, len(refs), MAX_JOURNEYS_A_RENEWAL):
            reply = await self._link.calls.renew(refs[start : start + MAX_JOURNEYS_A_RENEWAL])
            for state in reply.states:
                if state.state == "gone":
                    self._note_gone(state.journey, gone)
        return gone

    def _note_gone(self, ref: pb.JourneyRef, gone: set[str]) -> None:
        key = f"{ref.journey_id}/{ref.attempt}"
        passenger = self._link.passengers.get(ref.journey_id)
        if passenger is not None and key in self._gone_before:
            passenger.on_gone(self._link, ref)
        else:
            gone.add(key)
