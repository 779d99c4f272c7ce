"""Sends requests when they are due, whatever became of earlier ones, and keeps all that comes back.

A latency counts from when a request should have been sent: a generator that falls behind, or an endpoint that stops
reading, makes latencies longer and cannot hide itself. Only in a closed loop, which has to be asked for, the next
request waits for one before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_engine.errors import PdRelayError
from pd_ops.bench.serve.prompts import PromptMaker
from pd_ops.bench.serve.record import Outcome, Record, Recording
from pd_ops.bench.serve.sender import Sender, outcome_of
from pd_ops.bench.serve.traced import TracedRequest

PROGRESS_S = 2.0
LONG_PROMPT = 4096  # tokens; made in a millisecond


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """`span_s`: from the first request's due time to the last answer, or to the interruption."""

    records: tuple[Record, ...]
    span_s: float
    interrupted: bool


class Measurement:
    """One run. Made in the event loop that it runs in.

    Args:
        concurrency: requests at once in a closed loop; None: each at its arrival.
        max_in_flight: open requests at most; a further one waits, and its latency counts.
    """

    def __init__(
        self, requests: Sequence[TracedRequest], sender: Sender, prompts: PromptMaker, *,
        concurrency: int | None, max_in_flight: int, note: Callable[[str], None],
    ) -> None:
        self._requests = requests
        self._sender = sender
        self._prompts = prompts
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency or max_in_flight)
        self._note = note
        self._open: dict[int, Recording] = {}
        self._records: list[Record] = []
        self._begin_s = time.monotonic()

    async def run(self, stop: asyncio.Event) -> Measured:
        """Until all have ended, or `stop` is set: what runs then is cancelled, and counted as unfinished."""
        self._begin_s = time.monotonic()
        sending = asyncio.create_task(self._send_all())
        progress = asyncio.create_task(self._tell())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([sending, stopping], return_when=asyncio.FIRST_COMPLETED)
            interrupted = not sending.done()
            span_s = self.now()
            if not interrupted:
                sending.result()
        finally:
            for task in (sending, progress, stopping):
                task.cancel()
            await asyncio.gather(sending, progress, stopping, return_exceptions=True)
        self._records += [one.close(Outcome.UNFINISHED, span_s) for one in self._open.values()]
        if not interrupted:
            span_s = max((record.end_s for record in self._records), default=span_s)
        return Measured(records=tuple(sorted(self._records, key=lambda one: one.number)), span_s=span_s,
                        interrupted=interrupted)

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(self._requests):
                # Before it is due: making a long prompt takes time, in which no token would be received.
                token_ids = (
                    self._prompts.token_ids(request, number) if request.prompt_tokens <= LONG_PROMPT
                    else await asyncio.to_thread(self._prompts.token_ids, request, number)
                )
                if self._concurrency is not None:
                    await self._room.acquire()
                    due_s = self.now()
                else:
                    due_s = request.arrival_s
                    await asyncio.sleep(max(0.0, due_s - self.now()))
                recording = Recording(
                    number=number, kind=request.kind, intended_s=due_s, prompt_tokens=len(token_ids),
                    asked_tokens=request.output_tokens, sent_s=due_s,
                )
                self._open[number] = recording
                group.create_task(self._send(recording, token_ids))

    async def _send(self, recording: Recording, token_ids: Sequence[int]) -> None:
        if self._concurrency is None:
            await self._room.acquire()
        recording.sent_s = max(recording.intended_s, self.now())
        outcome, error = Outcome.FINISHED, ""
        try:
            await self._sender.send(token_ids, recording, self.now)
        except PdRelayError as failure:
            outcome, error = outcome_of(failure), f"{failure.code.value}: {failure.message}"[:500]
        finally:
            self._room.release()
        del self._open[recording.number]
        self._records.append(recording.close(outcome, self.now(), error))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._note(self.progress())

    def progress(self) -> str:
        """One line of how far it is."""
        counts = {outcome: sum(one.outcome is outcome for one in self._records) for outcome in Outcome}
        sent = len(self._records) + len(self._open)
        return (
            f"{self.now():.0f} s: {sent} of {len(self._requests)} sent, {counts[Outcome.FINISHED]} finished, "
            f"{counts[Outcome.REFUSED]} refused, {counts[Outcome.FAILED]} failed, {len(self._open)} open"
        )

    def now(self) -> float:
        """Seconds since the measurement began."""
        return time.monotonic() - self._begin_s
