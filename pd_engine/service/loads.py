"""Periodic reports of a worker's load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable

from pd_engine.contracts import worker_pb2 as pb

MIN_INTERVAL_MS = 20
MAX_INTERVAL_MS = 60_000
DETAILS_EVERY = 10


async def stream_loads(
    request: pb.LoadsRequest, sample: Callable[[], pb.LoadsReply], details: Callable[[], pb.LoadsReply]
) -> AsyncIterator[pb.LoadsReply]:
    """One reply at once, then one every `interval_ms`, held within `MIN_INTERVAL_MS` and `MAX_INTERVAL_MS`; every
    `DETAILS_EVERY`th has the details, too, unless the files that say them cannot be opened."""
    interval_ms = min(max(request.interval_ms, MIN_INTERVAL_MS), MAX_INTERVAL_MS)
    for number in itertools.count():
        reply = sample()
        if number % DETAILS_EVERY == 0:
            with contextlib.suppress(OSError):
                reply.MergeFrom(details())
        yield reply
        await asyncio.sleep(interval_ms / 1000)
