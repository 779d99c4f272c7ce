"""A simulated prefill worker."""

from __future__ import annotations

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.service.rates import Rate
from pd_ops.sizing.cache import SimulatedCache
from pd_ops.sizing.cost_model import CostModel
from pd_ops.sizing.prompt_work import Job, PromptWork
from pd_router.pools import WorkerView
from pd_router.worker_load import WorkerLoad


class SimulatedPrefill:
    """Attributes:
    busy_s: that it has computed for.
    life: of the process; events of an earlier one are void.
    """

    def __init__(
        self, worker_id: str, cost: CostModel, cache: SimulatedCache, *, chunk_tokens: int
    ) -> None:
        self.worker_id = worker_id
        self.load = WorkerLoad()
        self.cache = cache
        self.work = PromptWork(cost, cache, self.load)
        self.is_up = True
        self.life = 0
        self.busy_s = 0.0
        self.is_busy = False
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._rate = Rate()
        self.report()

    def begin(self) -> float | None:
        """Seconds of its next step; None: it is busy, or has nothing to do."""
        if self.is_busy or not len(self.work) or not self.is_up:
            return None
        seconds, num_tokens = self.work.begin(self._chunk_tokens)
        self.is_busy = True
        self.busy_s += seconds
        self._rate.add(num_tokens, seconds)
        return seconds

    def end(self) -> list[Job]:
        self.is_busy = False
        return self.work.end()

    def report(self) -> None:
        """To the router."""
        self.load.note_report(pb.LoadsReply(
            prefill_tokens_per_s=self._rate.value, queued_prefill_tokens=max(0, self.work.num_queued_tokens)
        ))

    def view(self, num_blocks: int) -> WorkerView:
        return WorkerView(
            worker_id=self.worker_id, ready=self.is_up, num_queued_tokens=self.load.num_queued_tokens,
            num_blocks_free=num_blocks, num_blocks_total=num_blocks,
            prefill_ms_per_token=self.load.prefill_ms_per_token or self._cost.prefill_ms_per_token,
        )

    def come_back(self) -> None:
        self.is_up = True
        self.report()

    def die(self) -> list[Job]:
        self.is_up = self.is_busy = False
        self.life += 1
        self.cache.clear()
        return self.work.drop_all()
