"""Which jobs a prefill worker has. Pure."""

from __future__ import annotations

from kv_transfer.journey import JourneyKey
from pd_engine.errors import AlreadyExists, Gone
from pd_engine.service.tombstones import LONGEST_MESSAGE_LIFE_S, Tombstones
from prefill_worker.job import Job, JobState, PrefillSpec

MAX_REMEMBERED = 1_000  # newest attempts, settled ones included


class JobBook:
    """The newest attempt of each journey, settled or not, so that a repeated call gets the same answer; and every job
    that is open or whose blocks are in use: an ended one may be for a step, beside the attempt that follows it."""

    def __init__(self) -> None:
        self._newest: dict[str, Job] = {}  # by journey, by arrival
        self._busy: dict[str, Job] = {}  # by name, by arrival
        self._tombstones = Tombstones()

    @property
    def num_running(self) -> int:
        return sum(job.state is JobState.RUNNING for job in self._busy.values())

    @property
    def num_waiting(self) -> int:
        return sum(job.state in (JobState.QUEUED, JobState.FETCHING) for job in self._busy.values())

    @property
    def num_queued_tokens(self) -> int:
        return sum(job.num_remaining for job in self._busy.values())

    @property
    def is_idle(self) -> bool:
        """No prompt, no pin, no block in use."""
        return not self._busy

    def busy(self) -> list[Job]:
        """Those that are open, in compute or pinned, by arrival."""
        return list(self._busy.values())

    def named(self, name: str) -> Job | None:
        """Of those."""
        return self._busy.get(name)

    def remembered(self) -> list[Job]:
        """The newest attempts, by arrival."""
        return list(self._newest.values())

    def newest(self, journey_id: str) -> Job | None:
        return self._newest.get(journey_id)

    def find(self, key: JourneyKey) -> Job | None:
        """The job of exactly this attempt, if none has followed it."""
        job = self._newest.get(key.journey_id)
        return job if job is not None and job.spec.key == key else None

    def started(self, spec: PrefillSpec) -> Job | None:
        """The job that an equal call has started; None: the attempt is new here.

        Raises:
            Gone: released up to this attempt, or a higher attempt was seen.
            AlreadyExists: the same attempt with another payload.
        """
        journey_id, attempt = spec.key.journey_id, spec.key.attempt
        known = self._newest.get(journey_id)
        if self._tombstones.is_gone(journey_id, attempt) or (known is not None and known.spec.key.attempt > attempt):
            raise Gone
        if known is None or known.spec.key.attempt < attempt:
            return None
        if known.spec != spec:
            raise AlreadyExists(f"attempt {attempt} of journey {journey_id} is running with another payload")
        return known

    def add(self, job: Job) -> None:
        """The earlier attempt of the journey has ended."""
        self._newest.pop(job.spec.key.journey_id, None)
        self._newest[job.spec.key.journey_id] = self._busy[job.name] = job

    def gave_back(self, job: Job) -> bool:
        """Nobody uses its blocks any more. False: it was said before."""
        if self._busy.get(job.name) is not job:
            return False
        del self._busy[job.name]
        return True

    def bury(self, journey_id: str, up_to_attempt: int, now_s: float) -> None:
        """From now on attempts up to this one are gone."""
        self._tombstones.bury(journey_id, up_to_attempt, now_s)

    def forget(self, journey_id: str) -> None:
        """It was released: its tombstone answers for it."""
        self._newest.pop(journey_id, None)

    def tick(self, now_s: float) -> None:
        """Forgets what is old."""
        self._tombstones.tick(now_s)
        for journey_id, job in list(self._newest.items()):
            is_old = now_s >= job.settled_at_s + LONGEST_MESSAGE_LIFE_S or len(self._newest) > MAX_REMEMBERED
            if is_old and not job.is_open and job.name not in self._busy:
                del self._newest[journey_id]
