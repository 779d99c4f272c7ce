"""A prefill worker's state, all of it in the event loop's thread: jobs, their blocks, their ends.

Blocks are freed when the compute thread no longer writes to them *and* the handoff's source no longer serves them,
whatever came first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kv_transfer.journey import Clock, JourneyKey
from kv_transfer.prefix_fetch import PrefixFetcher
from kv_transfer.source import HandoffSource
from kv_transfer.source_state import SourceEnd
from pd_engine.cache.blocks import BlockPool
from pd_engine.errors import (
    Cancelled,
    DeadlineExceeded,
    Gone,
    InvalidArgument,
    PdRelayError,
    ResourceExhausted,
    Unavailable,
)
from pd_engine.priority import Turn
from pd_engine.service.rates import Rate
from prefill_worker.blocks import PromptBlocks
from prefill_worker.job import FirstTokenAnswer, Job, JobState, PrefillSpec
from prefill_worker.job_book import JobBook
from prefill_worker.publisher import HandoffPublisher
from prefill_worker.runner import FirstToken, PrefillRunner, StepReport
from prefill_worker.scheduler import Waiting, admit, queue_wait_ms

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]


class PrefillCore:
    """Args:
    post: runs a command in the compute thread between two steps.
    report: runs a callback in the event loop, from the compute thread.

    `fetcher` is given after construction, as it reports to `fetched`.

    Attributes:
        jobs: all that this worker has.
    """

    fetcher: PrefixFetcher[Job]

    def __init__(
        self, *, pool: BlockPool, blocks: PromptBlocks, hidden_dtype: str | None, max_queued_tokens: int,
        source: HandoffSource, runner: PrefillRunner, post: Post, report: Callable[..., None], clock: Clock,
    ) -> None:
        self._pool = pool
        self._blocks = blocks
        self._hidden_dtype = hidden_dtype
        self._max_queued_tokens = max_queued_tokens
        self._source = source
        self._runner = runner
        self._post = post
        self._report = report
        self._clock = clock
        self.jobs = JobBook()
        self.tokens_per_s = Rate()
        self._books_checked = False  # since the last job
        self.draining = False
        self.num_callers = 0

    # What routers ask for

    def submit(self, spec: PrefillSpec) -> Job:
        """The job of this call: a new one, or the one that an equal call has started.

        Raises:
            Gone: released up to this attempt, or a higher attempt was seen.
            AlreadyExists: the same attempt with another payload.
            InvalidArgument: it can never fit the worker's blocks.
            ResourceExhausted: the queue is full; with a retry hint.
            Unavailable: the worker is draining.
        """
        known = self.jobs.started(spec)
        if known is not None:
            return known
        job = self._new_job(spec)
        earlier = self.jobs.newest(spec.key.journey_id)
        if earlier is not None:
            self._end(earlier, Gone())
        self._books_checked = False
        self.jobs.add(job)
        self._admit_waiting()
        return job

    def release(self, journey_id: str, up_to_attempt: int) -> None:
        """Ends everything of the journey up to that attempt."""
        self.jobs.bury(journey_id, up_to_attempt, self._clock())
        self._source.release(journey_id, up_to_attempt)
        job = self.jobs.newest(journey_id)
        if job is not None and job.spec.key.attempt <= up_to_attempt:
            self._end(job, Gone())
            self.jobs.forget(journey_id)

    def abandon(self, job: Job) -> None:
        """Its caller went away before the first token was known: the work ends, and that attempt with it."""
        if job.is_open:
            self._end(job, Cancelled("the caller went away"))

    def renew(self, key: JourneyKey) -> str:
        """queued, running or gone; keeps the handoff's pins."""
        job = self.jobs.find(key)
        if job is None or job.state is JobState.FAILED:
            return "gone"
        if job.pinned:
            self._source.renew(key)
        if job.is_open:
            return "running" if job.state is JobState.RUNNING else "queued"
        return "running" if job.pinned else "gone"

    def tick(self, now_s: float) -> None:
        """Ends what is past its deadline, forgets what is old, and checks the books when idle."""
        for job in self.jobs.remembered():
            if job.is_open and job.turn.is_overdue(now_s):
                self._end(job, DeadlineExceeded("the request's deadline passed before its first token"))
        self.jobs.tick(now_s)
        self._admit_waiting()  # blocks may have come out of quarantine
        if self.jobs.is_idle and not self._books_checked:
            self._blocks.check_integrity()
            self._books_checked = True

    def fail_all(self, error: PdRelayError) -> None:
        """Nothing will be computed any more: every open job is answered with `error`."""
        for job in self.jobs.busy():
            self._end(job, error)

    # Ways through the worker

    def _new_job(self, spec: PrefillSpec) -> Job:
        if self.draining:
            raise Unavailable("this prefill worker is draining")
        now_s = self._clock()
        deadline_s = now_s + spec.deadline_ms / 1000 if spec.deadline_ms else None
        job = self._blocks.new_job(spec, Turn(priority=spec.priority, arrived_s=now_s, deadline_s=deadline_s))
        if job.num_blocks > self._pool.num_blocks:
            raise InvalidArgument(
                f"{spec.num_tokens} tokens need {job.num_blocks} blocks; this worker has {self._pool.num_blocks}"
            )
        queued = self.jobs.num_queued_tokens
        if queued and queued + spec.num_tokens > self._max_queued_tokens:
            raise ResourceExhausted(
                f"{queued} prompt tokens are queued; {self._max_queued_tokens} are allowed",
                retry_after_ms=queue_wait_ms(spec.num_tokens, self.tokens_per_s.value),
            )
        return job

    def _admit_waiting(self) -> None:
        queue = [job for job in self.jobs.busy() if job.state is JobState.QUEUED]
        if not queue:
            return
        queue.sort(key=lambda job: job.turn.rank)  # stable: ties by arrival
        waiting = [Waiting(job.name, self._blocks.num_missing(job), job.num_overtaken) for job in queue]
        admitted = set(admit(waiting, self._pool.num_free))
        for index, job in enumerate(queue):
            if job.name not in admitted:
                job.num_overtaken += sum(later.name in admitted for later in queue[index + 1 :])
        for job in queue:  # one that fails to begin may let others in: look again before each
            is_next = job.name in admitted and job.state is JobState.QUEUED
            if job.turn.is_overdue(self._clock()):
                continue  # `tick` ends it
            if is_next and self._pool.can_allocate(self._blocks.num_missing(job)):
                self._begin(job)

    def _begin(self, job: Job) -> None:
        self._blocks.take(job)
        wish = self._blocks.wish(job)
        if wish is not None and self.fetcher.start(job, wish):
            job.tried_to_fetch = True
            job.move(JobState.FETCHING)
            job.times.fetching_s = self._clock()
        else:
            self._run(job)

    def fetched(self, job: Job) -> None:
        """Its fetch has ended; without blocks it takes its place in the queue again."""
        if job.holds_blocks:
            self._run(job)
        else:
            job.move(JobState.QUEUED)
            self._admit_waiting()

    def _run(self, job: Job) -> None:
        spec = job.spec
        job.move(JobState.RUNNING)  # first: an older attempt's handoff may end below, which lets waiting jobs in
        publisher = None
        if not spec.no_handoff:
            try:
                job.source = self._source.begin(
                    spec.key, block_ids=job.block_ids, num_tokens=spec.num_tokens,
                    num_held_blocks=spec.num_held_blocks, lease_ms=spec.lease_ms,
                    on_end=lambda key, reason: self._pins_ended(job, reason),
                )
            except PdRelayError as error:
                self._end(job, error)
                return
            job.pinned = True
            publisher = HandoffPublisher(
                self._source, spec.key, self._hidden_dtype, num_cached_tokens=self._blocks.num_cached_tokens(job)
            )
            publisher.publish_cached(job.num_cached_blocks)
        sequence = self._blocks.start(job)
        job.in_compute = True
        job.times.running_s = self._clock()
        self._post(lambda: self._runner.add(sequence, publisher, job.turn))
        job.notify()

    def on_step(self, report: StepReport) -> None:
        """A step is done; in the event loop."""
        now_s = self._clock()
        if report.num_tokens:
            self.tokens_per_s.add(report.num_tokens, report.seconds)
        for name, num_computed in report.progress:
            if (job := self.jobs.named(name)) is not None:
                job.times.note_chunk(now_s, report.seconds, num_computed - job.num_computed)
                self._blocks.computed(job, num_computed)
        for first in report.first_tokens:
            self._serve(first)
        for name, error in report.failed.items():
            if (job := self.jobs.named(name)) is not None:
                job.in_compute = False
                self._end(job, error)

    def _serve(self, first: FirstToken) -> None:
        job = self.jobs.named(first.name)
        if job is None:
            return
        job.in_compute = False
        if job.state is JobState.RUNNING:
            job.move(JobState.SERVED)
            job.settled_at_s = self._clock()
            job.first = FirstTokenAnswer(
                index=job.spec.choice.num_emitted_tokens,
                token=first.token,
                finish_reason=first.finish_reason,
                stop_reason=first.stop_reason,
                num_cached_tokens=self._blocks.num_cached_tokens(job),
                times=job.times.message(job.settled_at_s),
            )
            job.notify()
        self._settle(job)

    def _end(self, job: Job, error: PdRelayError) -> None:
        """Ends a job at once, wherever it is; its blocks follow when nobody uses them."""
        if job.is_open:
            if job.state is JobState.FETCHING:
                self.fetcher.stop(job)
            job.move(JobState.FAILED)
            job.settled_at_s = self._clock()
            job.error = error
            self.jobs.bury(job.spec.key.journey_id, job.spec.key.attempt, self._clock())
            if job.in_compute:
                self._post(lambda: self._drop(job.name))
            job.notify()
        if job.pinned:
            self._source.fail(job.spec.key, error)
        self._settle(job)

    def _drop(self, name: str) -> None:
        """In the compute thread."""
        self._runner.drop(name)
        self._report(self._dropped, name)

    def _dropped(self, name: str) -> None:
        if (job := self.jobs.named(name)) is not None:
            job.in_compute = False
            self._settle(job)

    def _pins_ended(self, job: Job, reason: SourceEnd) -> None:
        job.pinned = False
        if job.is_open:
            log.info("%s: the handoff has ended (%s) before the prompt was computed", job.name, reason.value)
            self._end(job, Gone())
        self._settle(job)

    def _settle(self, job: Job) -> None:
        """Frees the blocks once nobody writes or reads them, and lets the next prompts in."""
        if job.is_open or job.in_compute or job.pinned or not self.jobs.gave_back(job):
            return
        if job.block_ids:
            self._blocks.release(job)
        self._admit_waiting()
