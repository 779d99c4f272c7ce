"""One load on one set of pools, in simulated time: the router's own classes in front of simulated workers.

Not played: fetches between workers, moves to host memory (a sequence has blocks for all its length from the start),
drafts that are accepted now and then (a step gives every sequence the same), lost messages. `pd-relay simulate faults`
plays those, on few workers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from decode_worker.itl_budget import ItlBudget
from pd_ops.sizing.cache import SimulatedCache
from pd_ops.sizing.cost_model import CostModel, Dice
from pd_ops.sizing.decode_side import SimulatedDecode
from pd_ops.sizing.front import Front
from pd_ops.sizing.outcome import Outcome, Totals, Traveller
from pd_ops.sizing.pools import Failure, Pool, Pools
from pd_ops.sizing.prefill_side import SimulatedPrefill
from pd_ops.sizing.prompt_work import Job
from pd_router.costs import num_uncached_tokens
from pd_router.placement import Placement, PrefillKind
from pd_router.prefix_index import PrefixIndex

REPORT_INTERVAL_S = 0.2


class World:
    """Runs once."""

    def __init__(self, pools: Pools, cost: CostModel, travellers: Sequence[Traveller], *, seed: int = 0,
                 failures: Sequence[Failure] = ()) -> None:
        self._pools = pools
        self._cost = cost
        self._travellers = travellers
        in_prefill = pools.num_blocks if pools.num_prefill_blocks is None else pools.num_prefill_blocks
        self._index = PrefixIndex(max_entries=max(1, pools.prefill * in_prefill + pools.decode * pools.num_blocks))
        self._dice = dice = Dice(cost, seed)
        self._prefill = Pool(
            [SimulatedPrefill(name, cost, self._cache(name, in_prefill), chunk_tokens=pools.chunk_tokens)
             for name in (f"prefill-{n}" for n in range(pools.prefill))],
            lambda worker: worker.view(in_prefill),
        )
        limit_ms = pools.itl_target_ms if pools.refuses and pools.itl_target_ms is not None else math.inf
        self._decode = Pool(
            [SimulatedDecode(name, cost, dice, self._cache(name, pools.num_blocks), num_blocks=pools.num_blocks,
                             max_batch=pools.max_batch, budget=ItlBudget(pools.itl_budget_ms / 1e3, pools.chunk_tokens),
                             computes_prompts=True)
             for name in (f"decode-{n}" for n in range(pools.decode))],
            lambda worker: worker.view(limit_ms if worker.passengers else math.inf),
        )
        self._front = Front(
            pools, self._index, prefill=self._prefill.views, decode=self._decode.views, at=self._at,
            placed=self._begin, refused=self._refused,
        )
        self._placed: dict[int, Traveller] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._num_open = len(travellers)
        self._totals = Totals()
        for failure in failures:
            self._at(failure.at_s, partial(self._fail, failure))

    def run(self) -> Outcome:
        arrivals = iter(self._travellers)
        self._next_arrival(arrivals)
        self._at(0.0, self._report)
        now_s = 0.0
        while self._num_open:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        assert self._front.num_running == 0, self._front.num_running
        return Outcome(
            travellers=tuple(self._travellers), totals=self._totals, span_s=now_s,
            prefill_busy_s=sum(worker.busy_s for worker in self._prefill.workers.values()),
            decode_busy_s=sum(worker.busy_s for worker in self._decode.workers.values()),
        )

    def _cache(self, worker_id: str, num_blocks: int) -> SimulatedCache:
        return SimulatedCache(worker_id, self._index, num_blocks=num_blocks, block_size=self._pools.block_size)

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happen))

    # The load

    def _next_arrival(self, arrivals: Iterable[Traveller]) -> None:
        traveller = next(iter(arrivals), None)
        if traveller is not None:
            self._at(traveller.arrival_s, partial(self._arrive, traveller, arrivals))

    def _arrive(self, traveller: Traveller, arrivals: Iterable[Traveller], now_s: float) -> None:
        self._next_arrival(arrivals)
        self._front.ask(traveller, now_s, is_again=False)

    def _refused(self) -> None:
        self._num_open -= 1

    def _report(self, now_s: float) -> None:
        for prefill in self._prefill.workers.values():
            prefill.report()
        for decode in self._decode.workers.values():
            decode.report()
        self._prefill.change_all()
        self._decode.change_all()
        self._front.turns(now_s)
        self._at(now_s + REPORT_INTERVAL_S, self._report)

    # A journey

    def _begin(self, traveller: Traveller, placement: Placement, now_s: float) -> None:
        number = traveller.number = next(self._numbers)
        self._placed[number] = traveller
        is_local = placement.kind is PrefillKind.LOCAL
        traveller.prefill_worker = "" if is_local else placement.prefill_worker
        traveller.decode_worker = placement.decode_worker or ""
        held = placement.snapshot.held.get(placement.prefill_worker, 0)
        num_uncached = min(
            num_uncached_tokens(placement.request, held), traveller.prompt.num_tokens - traveller.prompt.given_cached
        )
        self._totals.num_local += is_local
        if traveller.decode_worker:
            decode = self._decode.workers[traveller.decode_worker]
            decode.take(number, placement.request.num_decode_blocks)
            self._decode.change(decode)
        if is_local:
            decode.work.add(number, traveller.prompt, num_uncached)
            self._wake_decode(decode, now_s)
        else:
            prefill = self._prefill.workers[placement.prefill_worker]
            prefill.work.add(number, traveller.prompt, num_uncached)
            self._prefill.change(prefill)
            self._wake_prefill(prefill, now_s)

    def _wake_prefill(self, worker: SimulatedPrefill, now_s: float) -> None:
        seconds = worker.begin()
        if seconds is not None:
            self._at(now_s + seconds, partial(self._prefill_step, worker, worker.life))

    def _wake_decode(self, worker: SimulatedDecode, now_s: float) -> None:
        seconds = worker.begin()
        if seconds is not None:
            self._at(now_s + seconds, partial(self._decode_step, worker, worker.life))

    def _prefill_step(self, worker: SimulatedPrefill, life: int, now_s: float) -> None:
        if worker.life != life:
            return
        for job in worker.end():
            self._computed(job, now_s, handoff_s=self._cost.handoff_ms / 1e3)
            self._prefill.change(worker)
        self._wake_prefill(worker, now_s)

    def _decode_step(self, worker: SimulatedDecode, life: int, now_s: float) -> None:
        if worker.life != life:
            return
        step, jobs, ended = worker.end()
        if step.size:
            self._totals.note_step(step.size)
            seconds_a_token = step.seconds / self._cost.tokens_per_step
            if step.size > len(step.joined):
                self._totals.itl_ms.add(1e3 * seconds_a_token, step.size - len(step.joined))
            for number in step.joined:
                self._totals.itl_ms.add(1e3 * (now_s - self._placed[number].last_token_s))
        for job in jobs:
            self._computed(job, now_s, handoff_s=0.0)
        for number in ended:
            worker.leave(number)
            self._finish(self._placed.pop(number), now_s)
        if jobs or ended:
            self._decode.change(worker)
        self._wake_decode(worker, now_s)
        if ended and self._front.has_line:
            self._front.turns(now_s)

    def _computed(self, job: Job, now_s: float, *, handoff_s: float) -> None:
        """A prompt is done: its first token is on its way, and its cache too."""
        traveller = self._placed.get(job.number)
        if traveller is None:  # its decode worker has died meanwhile
            return
        alone_ms = self._cost.prompt_alone_ms(job.num_cached, job.prompt.num_tokens)
        at_s = now_s + max(0.0, self._cost.door_ms + self._dice.first_late() * math.sqrt(alone_ms)) / 1e3
        traveller.note_first(at_s, job.num_cached)
        if traveller.num_left <= 0:
            if traveller.decode_worker:
                self._decode.workers[traveller.decode_worker].leave(job.number)
            self._finish(self._placed.pop(job.number), at_s)
            return
        worker = self._decode.workers[traveller.decode_worker]
        worker.cache.keep(traveller.prompt)
        self._at(now_s + handoff_s, partial(self._join, worker, worker.life, job.number))

    def _join(self, worker: SimulatedDecode, life: int, number: int, now_s: float) -> None:
        traveller = self._placed.get(number)
        if worker.life != life or traveller is None:
            return
        num_steps = math.ceil(traveller.num_left / self._cost.tokens_per_step)
        worker.join(number, traveller.prompt.num_tokens + 1, num_steps)
        self._wake_decode(worker, now_s)

    def _finish(self, traveller: Traveller, now_s: float) -> None:
        traveller.end_s = max(now_s, traveller.last_token_s)
        traveller.ending = "finished"
        self._num_open -= 1
        self._front.end()

    # Failures

    def _fail(self, failure: Failure, now_s: float) -> None:
        """Of a worker that is there; what was computed for its requests elsewhere is lost with it."""
        lost: list[tuple[int, int]] = []
        if (prefill := self._prefill.workers.get(failure.worker_id)) is not None:
            lost = [(job.number, 0) for job in prefill.die()]
            self._prefill.change(prefill)
        elif (decode := self._decode.workers.get(failure.worker_id)) is not None:
            lost = list(decode.die().items())
            self._decode.change(decode)
        for number, num_steps in lost:
            traveller = self._placed.pop(number, None)
            if traveller is None:
                continue
            if prefill is not None and traveller.decode_worker:
                self._decode.workers[traveller.decode_worker].leave(number)
            traveller.lose(int(num_steps * self._cost.tokens_per_step))
            self._totals.num_moved += 1
            self._at(now_s + failure.noticed_after_s, partial(self._again, traveller))
        self._at(now_s + failure.back_after_s, partial(self._come_back, failure.worker_id))

    def _again(self, traveller: Traveller, now_s: float) -> None:
        self._front.ask(traveller, now_s, is_again=True)

    def _come_back(self, worker_id: str, now_s: float) -> None:
        if (prefill := self._prefill.workers.get(worker_id)) is not None:
            prefill.come_back()
            self._prefill.change(prefill)
        if (decode := self._decode.workers.get(worker_id)) is not None:
            decode.come_back()
            self._decode.change(decode)
        self._front.turns(now_s)
