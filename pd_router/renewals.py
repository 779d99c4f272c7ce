"""What keeps alive what journeys hold at a worker, and finds what the worker has lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from pd_engine.contracts import worker_pb2 as pb
from pd_router.worker_calls import LateAnswer, WorkerCalls

MAX_JOURNEYS_A_RENEWAL = 5_000


class Renewals:
    """Of one connection to a worker: a new one begins with nothing said.

    A journey counts as gone when two renewals in a row say so: its end may be on its way in another stream.

    Args:
        held: what is to be kept alive now.
        on_gone: told of what the worker has lost.
    """

    def __init__(
        self, calls: WorkerCalls, *, interval_s: float, held: Callable[[], list[pb.JourneyRef]],
        on_gone: Callable[[pb.JourneyRef], None],
    ) -> None:
        self._calls = calls
        self._held = held
        self._on_gone = on_gone
        self._interval_s = interval_s
        self._gone_before: set[str] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            with contextlib.suppress(LateAnswer):
                self._gone_before = await self._renew_all(self._held())

    async def _renew_all(self, refs: list[pb.JourneyRef]) -> set[str]:
        """Those that the worker says are gone, for the first time."""
        gone: set[str] = set()
        for start in range(0, len(refs), MAX_JOURNEYS_A_RENEWAL):
            reply = await self._calls.renew(refs[start : start + MAX_JOURNEYS_A_RENEWAL])
            for state in reply.states:
                if state.state == "gone":
                    self._note_gone(state.journey, gone)
        return gone

    def _note_gone(self, ref: pb.JourneyRef, gone: set[str]) -> None:
        key = f"{ref.journey_id}/{ref.attempt}"
        if key in self._gone_before:
            self._on_gone(ref)
        else:
            gone.add(key)
