"""Keeps the index of cached blocks up to date with one worker's events, for as long as the link to it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import PdRelayError, Unavailable
from pd_router.prefix_index import Applied, CacheEvents, PrefixIndex

log = logging.getLogger(__name__)

GAP_PAUSE_S = 0.2  # before a snapshot is asked for: one that is broken again at once costs little


async def follow_cache(
    index: PrefixIndex,
    worker_id: str,
    epoch: str,
    subscribe: Callable[[int], AsyncGenerator[pb.CacheEventBatch, None]],
) -> None:
    """Does not return. A worker without events, or with broken ones, serves on without an index.

    Args:
        epoch: of the worker's present life.
        subscribe: opens the stream of events after a sequence; 0: a snapshot first.

    Raises:
        Unavailable: the worker cannot be reached, or has begun another life.
    """
    from_sequence = index.resume(worker_id, epoch)
    while True:
        try:
            await _follow(index, worker_id, subscribe(from_sequence))
        except Unavailable:
            raise
        except PdRelayError as error:
            log.warning("worker %s is placed without regard to its cache: %s", worker_id, error.message)
            index.forget(worker_id)
            await asyncio.Event().wait()
        log.info("worker %s: cache events are missing, a snapshot is taken", worker_id)
        await asyncio.sleep(GAP_PAUSE_S)
        from_sequence = 0


async def _follow(index: PrefixIndex, worker_id: str, batches: AsyncGenerator[pb.CacheEventBatch, None]) -> None:
    """Returns after a gap.

    Raises:
        Unavailable: the stream ended.
        DataLoss: what should be a hash is none.
    """
    async with contextlib.aclosing(batches):
        async for batch in batches:
            events = CacheEvents(
                epoch=batch.epoch,
                previous_sequence=batch.previous_sequence,
                sequence=batch.sequence,
                is_snapshot=batch.snapshot,
                stored=tuple(batch.stored),
                removed=tuple(batch.removed),
            )
            if index.apply(worker_id, events) is Applied.GAP:
                return
    raise Unavailable(f"worker {worker_id} ended its cache events")
