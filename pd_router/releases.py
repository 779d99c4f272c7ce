"""What is to be released at one worker, sent in the background: many at once, a bounded number of times."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from pd_engine.contracts import worker_pb2 as pb

if TYPE_CHECKING:
    from pd_engine.contracts.worker_pb2_grpc import WorkerAsyncStub

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
NUM_TRIES = 4
FIRST_BACKOFF_S = 0.1
CLOSE_TIMEOUT_S = 2.0
MAX_JOURNEYS_A_CALL = 5_000


class ReleaseQueue:
    """A worker that cannot be reached ends by itself what nobody renews, so a release may be given up."""

    def __init__(self, worker_id: str, worker: WorkerAsyncStub) -> None:
        self._worker_id = worker_id
        self._worker = worker
        self._attempts: dict[str, int] = {}
        self._reason = ""
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._run(), name=f"releases at {worker_id}")

    def add(self, journey_id: str, up_to_attempt: int, reason: str) -> None:
        self._attempts[journey_id] = max(up_to_attempt, self._attempts.get(journey_id, 0))
        self._reason = reason
        self._idle.clear()
        self._wanted.set()

    async def flushed(self) -> None:
        """Until everything so far is sent or given up."""
        await self._idle.wait()

    async def close(self) -> None:
        """Waits until everything is sent or given up, within a bound."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.flushed()
        except TimeoutError:
            log.warning("worker %s: %d releases were not sent", self._worker_id, len(self._attempts))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._attempts:
                journeys = list(self._attempts)[:MAX_JOURNEYS_A_CALL]
                await self._send({journey: self._attempts.pop(journey) for journey in journeys})
            if not self._wanted.is_set():
                self._idle.set()

    async def _send(self, attempts: dict[str, int]) -> None:
        request = pb.ReleaseRequest(
            journeys=[pb.JourneyRef(journey_id=journey, attempt=attempt) for journey, attempt in attempts.items()],
            reason=self._reason,
        )
        for attempt in range(NUM_TRIES):
            if attempt:
                await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
            try:
                await self._worker.Release(request, timeout=TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as error:
                reason = error.details()
        log.warning("worker %s: %d journeys could not be released: %s", self._worker_id, len(attempts), reason)
