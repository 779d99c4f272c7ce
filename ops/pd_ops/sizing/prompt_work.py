"""Prompts that a simulated worker of either pool computes: the planner of chunks is the production one, what
they take is a duration of the cost model."""

from __future__ import annotations

from dataclasses import dataclass

from pd_engine.chunk_plan import Remaining, plan_chunks
from pd_ops.sizing.cache import Prompt, SimulatedCache
from pd_ops.sizing.cost_model import CostModel
from pd_router.worker_load import WorkerLoad


@dataclass(eq=False, slots=True)
class Job:
    """A prompt at a worker that computes it.

    Attributes:
        number: of its placement. num_assigned, assigned_at: what the router counts as waiting there for it.
        num_done: tokens that are computed or cached; set when its first chunk is planned.
    """

    number: int
    prompt: Prompt
    num_assigned: int
    assigned_at: int
    num_done: int = 0
    num_cached: int = 0
    has_begun: bool = False


class PromptWork:
    """Prompts that one worker computes, by arrival."""

    def __init__(self, cost: CostModel, cache: SimulatedCache, load: WorkerLoad) -> None:
        self._cost = cost
        self._cache = cache
        self._load = load
        self._jobs: dict[str, Job] = {}
        self._planned: list[tuple[Job, int]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, number: int, prompt: Prompt, num_uncached: int) -> None:
        """`num_uncached`: tokens to compute, as far as the router knows."""
        assigned_at = self._load.assign_tokens(num_uncached)
        self._jobs[str(number)] = Job(number, prompt, num_uncached, assigned_at)

    def begin(self, num_tokens: int) -> tuple[float, int]:
        """A step of so many tokens at most: what it should take, in seconds, and how many tokens it has."""
        for job in self._jobs.values():
            if not job.has_begun:
                job.has_begun = True
                job.num_cached = job.num_done = self._cache.num_cached(job.prompt)
        plans = plan_chunks(
            [Remaining(name, job.prompt.num_tokens - job.num_done) for name, job in self._jobs.items()], num_tokens
        )
        self._planned = [(self._jobs[plan.name], plan.num_tokens) for plan in plans]
        return (self._cost.prefill_s([(job.num_done, count) for job, count in self._planned]),
                sum(plan.num_tokens for plan in plans))

    def end(self) -> list[Job]:
        """The step is over: prompts that are done."""
        done = []
        for job, count in self._planned:
            job.num_done += count
            if job.num_done >= job.prompt.num_tokens:
                done.append(self._jobs.pop(str(job.number)))
                self._load.note_computed(job.num_assigned, job.assigned_at)
                self._cache.keep(job.prompt)
        self._planned = []
        return done

    @property
    def num_queued_tokens(self) -> int:
        return sum(
            job.prompt.num_tokens - (job.num_done if job.has_begun else self._cache.num_cached(job.prompt))
            for job in self._jobs.values()
        )

    def drop_all(self) -> list[Job]:
        """The worker has died."""
        dropped = list(self._jobs.values())
        self._jobs.clear()
        self._planned = []
        for job in dropped:
            self._load.note_computed(job.num_assigned, job.assigned_at)
        return dropped
