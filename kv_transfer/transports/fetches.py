"""The fetches of a connection that run in a thread, and cannot be called back: whoever gave one up waits for its end
before its memory is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from kv_transfer.threads import run_in_thread
from kv_transfer.transport import Fetched
from kv_transfer.transports.interest import Interest
from pd_engine.errors import DeadlineExceeded


class Fetches:
    """Used in the event loop's thread; what it runs looks at its `Interest` from another."""

    def __init__(self) -> None:
        self._unfinished: dict[asyncio.Future[Fetched], Interest] = {}

    async def run(
        self, executor: Executor, call: Callable[[Interest], Fetched], *, num_bytes: int, timeout_s: float,
        on_abandoned: Callable[[], None] = lambda: None,
    ) -> Fetched:
        """Runs `call` in the executor. If this raises or is cancelled before it has ended, the fetch is given up
        (`Interest.give_up`) and goes on until it notices.

        Raises:
            DeadlineExceeded: it took longer than `timeout_s`.
            Unavailable: there is no thread for it; it never runs.
        """
        interest = Interest()
        job = run_in_thread(executor, partial(call, interest))
        self._unfinished[job] = interest
        job.add_done_callback(self._finished)
        try:
            await asyncio.wait([job], timeout=timeout_s)
        finally:
            if not job.done():
                interest.give_up(on_abandoned)
        if not job.done():
            raise DeadlineExceeded(f"{num_bytes} bytes did not come within {timeout_s} s")
        return job.result()

    async def quiesce(self) -> None:
        """Returns when all that were given up have ended."""
        stopped = [job for job, interest in self._unfinished.items() if not interest.is_wanted]
        if stopped:
            await asyncio.wait(stopped)

    async def abandon(self) -> None:
        """Gives all of them up, and returns when they have ended."""
        for interest in self._unfinished.values():
            interest.abandon()
        await self.quiesce()

    def _finished(self, job: asyncio.Future[Fetched]) -> None:
        self._unfinished.pop(job).end()
        if not job.cancelled():
            job.exception()  # nobody may be left to look at it
