"""A recorded trace, and prefill workers that compute nothing, to try placement on.

A simulated worker computes one prompt after the other at a fixed speed, keeps blocks of finished prompts, the deepest
of the least recently used going first, and reports what waits. Time is simulated; nothing waits for it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.hashing import HASH_BYTES
from pd_ops.bench.serve.traces import MOONCAKE_BLOCK
from pd_ops.bench.serve.traces import read_trace as read_published
from pd_router.pools import WorkerView
from pd_router.worker_load import WorkerLoad

BLOCK_SIZE = MOONCAKE_BLOCK
ROOMY = 10**9  # blocks: this is about prefill


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """`block_hashes`: of its full blocks."""

    arrival_s: float
    num_tokens: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A request at a worker: what the router counts as waiting there for it, and since which report."""

    request: TracedRequest
    num_assigned_tokens: int
    assigned_at: int


def read_trace(path: Path, most: int | None = None) -> list[TracedRequest]:
    """A file in Mooncake's format, as `bench serve` reads it, by arrival.

    Args:
        path: plain, or compressed with gzip if its name ends in .gz.
        most: requests to read; None: all.

    Raises:
        InvalidArgument: the file cannot be read, or is in another format.
        NotFound: there is none.
    """
    return [
        TracedRequest(one.arrival_s, max(1, one.prompt_tokens), tuple(
            (block % 2**63).to_bytes(HASH_BYTES, "little") for block in one.prefix[: one.prompt_tokens // BLOCK_SIZE]
        ))
        for one in read_published(path, "mooncake", most=most)
    ]


class SimulatedPrefill:
    """One worker.

    Attributes:
        load: as a router knows it.
        tokens_per_s: that it computes; prompts that have begun keep the speed that they began with.
    """

    def __init__(self, worker_id: str, *, tokens_per_s: float, cache_blocks: int) -> None:
        self.worker_id = worker_id
        self.load = WorkerLoad()
        self.tokens_per_s = tokens_per_s
        self._cache_blocks = cache_blocks
        self._cache: OrderedDict[bytes, None] = OrderedDict()  # the next to be evicted first
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._ends_s = 0.0
        self.report(0.0)

    def submit(self, request: TracedRequest, num_uncached: int) -> None:
        """`num_uncached`: tokens to compute, as far as the router knows."""
        assigned_at = self.load.assign_tokens(num_uncached)
        self._waiting.append(Job(request=request, num_assigned_tokens=num_uncached, assigned_at=assigned_at))

    def begin(self, now_s: float) -> tuple[float, int] | None:
        """The next prompt: when it will be done, and how many of its tokens are cached. None: busy, or none waits."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        num_cached = self._num_cached_tokens(self._running.request)
        self._ends_s = now_s + max(1, self._running.request.num_tokens - num_cached) / self.tokens_per_s
        return self._ends_s, num_cached

    def finish(self) -> tuple[TracedRequest, list[bytes], list[bytes]]:
        """What was computed, and what the cache has stored and removed for it."""
        assert self._running is not None, self.worker_id
        job, self._running = self._running, None
        self.load.note_computed(job.num_assigned_tokens, job.assigned_at)
        hashes = job.request.block_hashes
        new = {block_hash for block_hash in hashes if block_hash not in self._cache}
        for block_hash in reversed(hashes):
            self._cache[block_hash] = None
            self._cache.move_to_end(block_hash)
        removed = [self._cache.popitem(last=False)[0] for _ in range(len(self._cache) - self._cache_blocks)]
        return job.request, [h for h in hashes if h in new and h in self._cache], [h for h in removed if h not in new]

    def report(self, now_s: float) -> None:
        """To the router."""
        waiting = (job.request for job in self._waiting)
        num_queued = sum(max(1, request.num_tokens - self._num_cached_tokens(request)) for request in waiting)
        if self._running is not None:
            num_queued += round((self._ends_s - now_s) * self.tokens_per_s)
        self.load.note_report(
            pb.LoadsReply(prefill_tokens_per_s=self.tokens_per_s, queued_prefill_tokens=max(0, num_queued))
        )

    def view(self) -> WorkerView:
        return WorkerView(
            worker_id=self.worker_id, ready=True, num_queued_tokens=self.load.num_queued_tokens,
            num_blocks_free=ROOMY, num_blocks_total=ROOMY, prefill_ms_per_token=1000 / self.tokens_per_s,
        )

    def _num_cached_tokens(self, request: TracedRequest) -> int:
        leading = itertools.takewhile(self._cache.__contains__, request.block_hashes)
        return BLOCK_SIZE * sum(1 for _ in leading)
