"""A simulated decode worker: steps of a batch, and prompts of its own in chunks that keep to the production budget."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from decode_worker.itl_budget import ItlBudget
from pd_engine.contracts import worker_pb2 as pb
from pd_ops.sizing.cache import SimulatedCache
from pd_ops.sizing.cost_model import CostModel, Dice
from pd_ops.sizing.prompt_work import Job, PromptWork
from pd_router.pools import WorkerView
from pd_router.worker_load import WorkerLoad


@dataclass(order=True, slots=True)
class Running:
    """A sequence in a batch: it ends with the step `ends_at`, counted by the worker."""

    ends_at: int
    number: int
    num_slots: float = field(compare=False)
    begun_at: int = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Of a decode worker: how long it took, with how many sequences, and which of them were new in it."""

    seconds: float
    size: int
    joined: tuple[int, ...]


class SimulatedDecode:
    """Steps while it has sequences or prompts of its own; one step gives each sequence `tokens_per_step`.

    Attributes:
        passengers: placements here that have not ended, and the blocks of each.
    """

    def __init__(
        self, worker_id: str, cost: CostModel, dice: Dice, cache: SimulatedCache, *, num_blocks: int, max_batch: int,
        budget: ItlBudget, computes_prompts: bool,
    ) -> None:
        self.worker_id = worker_id
        self.load = WorkerLoad()
        self.cache = cache
        self.work = PromptWork(cost, cache, self.load)
        self.passengers: dict[int, int] = {}
        self.is_up = True
        self.life = 0
        self.busy_s = 0.0
        self.is_busy = False
        self._cost = cost
        self._dice = dice
        self._num_blocks = num_blocks
        self._num_blocks_taken = 0
        self._max_batch = max_batch
        self._budget = budget
        self._computes_prompts = computes_prompts
        self._batch: list[Running] = []  # a heap
        self._num_slots = 0.0
        self._num_steps = 0
        self._waiting: deque[tuple[int, float, int]] = deque()  # (placement, slots, steps)
        self._step: Step | None = None
        self._last_itl_s = 0.0
        self.report()

    def take(self, number: int, num_blocks: int) -> None:
        """Somebody is placed here."""
        self.passengers[number] = num_blocks
        self._num_blocks_taken += num_blocks
        self.load.note_arrival(str(number))
        self.load.assign_blocks(num_blocks)

    def leave(self, number: int) -> None:
        """It has ended, or goes elsewhere."""
        self._num_blocks_taken -= self.passengers.pop(number)
        self.load.note_departure(str(number))

    def join(self, number: int, num_slots: int, num_steps: int) -> None:
        """Its prompt is here: it decodes for so many steps once the batch has a place."""
        self._waiting.append((number, float(num_slots), num_steps))

    def begin(self) -> float | None:
        """Seconds of its next step; None: it is busy, or has nothing to do."""
        if self.is_busy or not self.is_up:
            return None
        joined = []
        while self._waiting and len(self._batch) < self._max_batch:
            number, num_slots, num_steps = self._waiting.popleft()
            heapq.heappush(self._batch, Running(self._num_steps + num_steps, number, num_slots, self._num_steps))
            self._num_slots += num_slots
            joined.append(number)
        size = len(self._batch)
        decode_s = self._cost.decode_s(size, self._num_slots) * self._dice.decode() if size else 0.0
        chunk_s = 0.0
        if len(self.work):
            num_tokens = self._budget.chunk_tokens(decode_s if size else None)
            if num_tokens:
                chunk_s, count = self.work.begin(num_tokens)
                if size:
                    self._budget.note_chunk(count, chunk_s)
        if not size and not chunk_s:
            return None
        self.is_busy = True
        self.busy_s += decode_s + chunk_s
        self._step = Step(seconds=decode_s + chunk_s, size=size, joined=tuple(joined))
        return decode_s + chunk_s

    def end(self) -> tuple[Step, list[Job], list[int]]:
        """(what the step was, prompts that are done, placements that have their last token)."""
        assert self._step is not None, self.worker_id
        step, self._step = self._step, None
        self.is_busy = False
        ended = []
        if step.size:
            self._num_steps += 1
            tokens = self._cost.tokens_per_step
            self._num_slots += step.size * tokens
            self._last_itl_s = step.seconds / tokens
            while self._batch and self._batch[0].ends_at <= self._num_steps:
                done = heapq.heappop(self._batch)
                self._num_slots -= done.num_slots + (self._num_steps - done.begun_at) * tokens
                ended.append(done.number)
        return step, self.work.end(), ended

    def report(self) -> None:
        num_running = len(self._batch)
        self.load.note_report(pb.LoadsReply(
            num_running=num_running, num_leases=len(self.passengers) - num_running,
            num_blocks_free=self._num_blocks - self._num_blocks_taken, itl_ms=1e3 * self._last_itl_s,
            queued_prefill_tokens=self.work.num_queued_tokens,
        ))

    def view(self, itl_limit_ms: float) -> WorkerView:
        num_sequences = max(len(self.passengers), self.load.num_sequences)
        itl = self.load.itl
        tokens = self._cost.tokens_per_step

        def expected_ms(count: int) -> float:
            return itl.at(count) if itl.is_measured else 1e3 * self._cost.decode_s(count, 0) / tokens

        return WorkerView(
            worker_id=self.worker_id, ready=self.is_up, num_queued_tokens=self.load.num_queued_tokens,
            num_sequences=num_sequences, num_blocks_free=self.load.num_blocks_free, num_blocks_total=self._num_blocks,
            next_itl_ms=expected_ms(num_sequences + 1), alone_itl_ms=expected_ms(1), itl_limit_ms=itl_limit_ms,
            local_prefill_ms_per_token=self._cost.prefill_ms_per_token if self._computes_prompts else None,
        )

    def come_back(self) -> None:
        self.is_up = True
        self.report()

    def die(self) -> dict[int, int]:
        """The placements that were here, and how many steps each has had."""
        self.is_up = self.is_busy = False
        self.life += 1
        lost = dict.fromkeys(self.passengers, 0)
        lost |= {one.number: self._num_steps - one.begun_at for one in self._batch if one.number in lost}
        for number in lost:
            self.leave(number)
        self.work.drop_all()
        self.cache.clear()
        self._batch.clear()
        self._waiting.clear()
        self._num_slots, self._step = 0.0, None
        return lost
