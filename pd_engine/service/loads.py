"""Periodic reports of a worker's load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pd_engine.contracts import worker_pb2 as pb

MIN_INTERVAL_MS = 20
MAX_INTERVAL_MS = 60_000


async def stream_loads(request: pb.LoadsRequest, sample: Callable[[], pb.LoadsReply]) -> AsyncIterator[pb.LoadsReply]:
    """One reply at once, then one every `interval_ms`, held within `MIN_INTERVAL_MS` and `MAX_INTERVAL_MS`."""
    interval_ms = min(max(request.interval_ms, MIN_INTERVAL_MS), MAX_INTERVAL_MS)
    while True:
        yield sample()
        await asyncio.sleep(interval_ms / 1000)
