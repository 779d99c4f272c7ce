"""Ways to choose a prefill worker, on a recorded trace: the router's own classes for reports, index and choice, with
simulated workers and simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial

from pd_ops.bench.measured_process import Document
from pd_ops.bench.placement_trace import BLOCK_SIZE, ROOMY, SimulatedPrefill, TracedRequest
from pd_router.costs import num_uncached_tokens
from pd_router.placement import Placement, place
from pd_router.pools import PlacementRequest, Snapshot, WorkerView
from pd_router.prefix_index import CacheEvents, PrefixIndex

REPORT_INTERVAL_S = 0.2
DECODE = WorkerView(worker_id="decode", ready=True, num_blocks_free=ROOMY, num_blocks_total=ROOMY)


class Policy(Enum):
    TURNS = "in turns"
    SHORTEST_QUEUE = "shortest queue"
    LONGEST_PREFIX = "longest cached prefix, then shortest queue"
    COSTS = "costs, as the router places"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRow:
    """`cached_share`: of all prompt tokens. Times until the first token are simulated, in seconds."""

    policy: str
    num_requests: int
    cached_share: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float

    def to_json(self) -> Document:
        return asdict(self)


def replay(
    trace: Sequence[TracedRequest], policy: Policy, *, num_workers: int, tokens_per_s: float, cache_blocks: int
) -> ReplayRow:
    """The whole trace, at workers that each compute so many tokens a second and cache so many blocks."""
    workers = [
        SimulatedPrefill(f"prefill-{number}", tokens_per_s=tokens_per_s, cache_blocks=cache_blocks)
        for number in range(num_workers)
    ]
    return _Replay(trace, policy, workers, PrefixIndex(max_entries=num_workers * cache_blocks)).run()


class _Replay:
    def __init__(
        self, trace: Sequence[TracedRequest], policy: Policy, workers: list[SimulatedPrefill], index: PrefixIndex
    ) -> None:
        self._trace = trace
        self._policy = policy
        self._workers = {worker.worker_id: worker for worker in workers}
        self._turn = itertools.cycle(self._workers)
        self._index = index
        self._sequences = dict.fromkeys(self._workers, 1)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._ttfts_s: list[float] = []
        self._num_cached_tokens = 0

    def run(self) -> ReplayRow:
        for worker_id in self._workers:
            self._index.apply(worker_id, CacheEvents(epoch="1", previous_sequence=0, sequence=1, is_snapshot=True))
        for request in self._trace:
            self._at(request.arrival_s, partial(self._arrive, request))
        self._at(self._trace[0].arrival_s, self._report)
        while len(self._ttfts_s) < len(self._trace):
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        ttfts_s, count = sorted(self._ttfts_s), len(self._ttfts_s)
        return ReplayRow(
            policy=self._policy.value, num_requests=count,
            cached_share=self._num_cached_tokens / sum(request.num_tokens for request in self._trace),
            ttft_mean_s=sum(ttfts_s) / count, ttft_p50_s=ttfts_s[count // 2], ttft_p99_s=ttfts_s[count * 99 // 100],
        )

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happen))

    def _report(self, now_s: float) -> None:
        for worker in self._workers.values():
            worker.report(now_s)
        self._at(now_s + REPORT_INTERVAL_S, self._report)

    def _arrive(self, request: TracedRequest, now_s: float) -> None:
        held = self._index.held(request.block_hashes)
        wanted = PlacementRequest(
            num_tokens=request.num_tokens, num_prefill_blocks=1, num_decode_blocks=1, block_size=BLOCK_SIZE,
            block_hashes=request.block_hashes,
        )
        worker = self._workers[self._choose(wanted, held)]
        worker.submit(request, num_uncached_tokens(wanted, held.get(worker.worker_id, 0)))
        self._begin(worker, now_s)

    def _choose(self, wanted: PlacementRequest, held: Mapping[str, int]) -> str:
        match self._policy:
            case Policy.TURNS:
                return next(self._turn)
            case Policy.SHORTEST_QUEUE:
                return min(self._workers, key=self._num_queued)
            case Policy.LONGEST_PREFIX:
                return min(self._workers, key=lambda name: (-held.get(name, 0), self._num_queued(name)))
            case Policy.COSTS:
                views = tuple(worker.view() for worker in self._workers.values())
                placement = place(wanted, Snapshot(prefill=views, decode=(DECODE,), held=held))
                assert isinstance(placement, Placement), placement
                return placement.prefill_worker

    def _num_queued(self, worker_id: str) -> int:
        return self._workers[worker_id].load.num_queued_tokens

    def _begin(self, worker: SimulatedPrefill, now_s: float) -> None:
        begun = worker.begin(now_s)
        if begun is not None:
            ends_s, num_cached = begun
            self._num_cached_tokens += num_cached
            self._at(ends_s, partial(self._finish, worker))

    def _finish(self, worker: SimulatedPrefill, now_s: float) -> None:
        request, stored, removed = worker.finish()
        self._ttfts_s.append(now_s - request.arrival_s)
        before = self._sequences[worker.worker_id]
        self._sequences[worker.worker_id] = after = before + len(stored) + len(removed)
        self._index.apply(worker.worker_id, CacheEvents(
            epoch="1", previous_sequence=before, sequence=after, stored=stored, removed=removed
        ))
        self._begin(worker, now_s)
