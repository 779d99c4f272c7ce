"""The stream of a worker's cache events: what its prefix cache holds, and every change of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from pd_engine.cache.events import CacheChanges, CacheLog
from pd_engine.contracts import worker_pb2 as pb

MAX_HASHES_A_MESSAGE = 16_384


async def stream_cache_events(
    request: pb.CacheEventsRequest, log: CacheLog, epoch: str
) -> AsyncIterator[pb.CacheEventBatch]:
    """A message at once: a snapshot, or what has changed since event `from_sequence` of this epoch (maybe nothing).
    Then one whenever something has changed; changes that come together come in one."""
    news = asyncio.Event()
    log.listen(news.set)
    known = request.from_sequence or None
    try:
        if known is not None and log.changes_after(known) is None:
            yield pb.CacheEventBatch(epoch=epoch, sequence=known, previous_sequence=known)
        while True:
            news.clear()
            changes = log.changes_after(known)
            if changes is not None:
                for batch in event_batches(changes, epoch, known or 0):
                    yield batch
                known = changes.sequence
            await news.wait()
    finally:
        log.stop_listening(news.set)


def event_batches(
    changes: CacheChanges, epoch: str, known: int, max_hashes: int = MAX_HASHES_A_MESSAGE
) -> Iterator[pb.CacheEventBatch]:
    """One or more messages of bounded size. All but the last one carry the number from which a reader that got no
    further must resume: a snapshot that broke off is asked for again (0), changes are told again.

    Args:
        known: the event after which the changes come; 0 for a snapshot.
    """
    before = 0 if changes.snapshot else known
    hashes = [(block_hash, True) for block_hash in changes.stored]
    hashes += [(block_hash, False) for block_hash in changes.removed]
    for start in range(0, max(1, len(hashes)), max_hashes):
        part = hashes[start : start + max_hashes]
        yield pb.CacheEventBatch(
            epoch=epoch,
            sequence=changes.sequence if start + max_hashes >= len(hashes) else before,
            previous_sequence=before,
            snapshot=changes.snapshot and start == 0,
            stored=[block_hash for block_hash, is_stored in part if is_stored],
            removed=[block_hash for block_hash, is_stored in part if not is_stored],
        )
