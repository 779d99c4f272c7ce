"""How many drafts a decode step makes: as many as pay, none where none pays. Pure: durations in, a number out.

With `a_j` the measured share of steps whose draft j is accepted, given that the ones before it are, k drafts give

    tokens(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k

tokens a sequence (Leviathan et al. 2023, section 3.1, with a rate of its own for each depth), and a step with k drafts
takes a measured multiple of one without: k is chosen for the most tokens in a time. Tokens never depend on it.

What a step takes also depends on how long its contexts are, who is in it and what else the machine does. So durations
of different times are never compared. A *trial* runs another number of drafts for a few steps, between steps with the
usual one; what comes out of it is the ratio of both, which holds longer than either. Trials become ever more seldom
while they change nothing. What is known of drafts that were not made since the last trial counts for little in the next
one.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TRIAL_STEPS = 5            # of another number of drafts; the first one is not measured: it has states to catch up with
AFTER_STEPS = 5            # with the usual number again, which end a trial; the first one is not measured either
USUAL_STEPS = 8            # as many from after a trial as from before it
WINDOW_STEPS = 64          # of all batch sizes; older steps say nothing of one now
FIRST_TRIAL_AFTER = 16     # steps of a batch size
MIN_TRIAL_INTERVAL = 64    # steps between two trials of a batch size
MAX_TRIAL_INTERVAL = 512   # while trials change nothing
MARGIN = 1.03              # another number of drafts must be so much better
KEPT_COSTS = 3             # the last ones of the usual number; their median counts
ACCEPTANCE_HALF_LIFE = 32.0  # drafts
OLD_DRAFTS = 4.0           # that all older ones of a depth weigh in a trial that makes them again
FUTILE_TRIALS = 2          # in a row that could not have paid show that none can


@dataclass(frozen=True, slots=True)
class _Step:
    """Attributes:
    number: among all steps.
    seconds: a sequence.
    made: drafts of each sequence.
    """

    number: int
    seconds: float
    made: Sequence[int]


@dataclass(slots=True)
class _Trial:
    """Attributes:
    drafts: in place of the usual number.
    num_left, num_after: steps of it still to run, and steps after it.
    steps: that were measured.
    """

    drafts: int
    num_left: int = TRIAL_STEPS
    num_after: int = AFTER_STEPS
    steps: list[_Step] = field(default_factory=list)


@dataclass(slots=True)
class _Bucket:
    """What is known of one range of batch sizes.

    Attributes:
        usual: drafts of a step outside trials.
        steps: the last ones of these that were measured.
        costs: of one draft a sequence, in steps without drafts; of the usual number of them, not known for 0.
        interval: steps from a trial to the next.
        until_trial: steps that are left until it.
        num_trials: so far.
        num_futile: trials in a row, up to the last, whose drafts would not have paid had all been accepted; None: no
            trial yet.
    """

    usual: int = 0
    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=USUAL_STEPS))
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_COSTS))
    trial: _Trial | None = None
    interval: int = MIN_TRIAL_INTERVAL
    until_trial: int = FIRST_TRIAL_AFTER
    num_trials: int = 0
    num_futile: int | None = None


class SpeculationPolicy:
    """Args:
    max_drafts: the most that anybody may ask for; 0: never any.
    """

    def __init__(self, max_drafts: int) -> None:
        assert max_drafts >= 0, max_drafts
        self._max_drafts = max_drafts
        self._buckets: dict[int, _Bucket] = {}
        self._tried = [0.0] * max_drafts     # drafts of each depth that were verified, old ones fading
        self._accepted = [0.0] * max_drafts  # of them
        self._num_steps = 0

    def choose(self, num_sequences: int) -> int:
        """Drafts that each sequence of the next step shall make at most."""
        if not self._max_drafts:
            return 0
        bucket = self._bucket(num_sequences)
        return bucket.trial.drafts if bucket.trial is not None and bucket.trial.num_left else bucket.usual

    def record(self, num_sequences: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """The step that `choose` was asked for is done.

        Args:
            drafted, accepted: of each sequence that has got tokens; one may draft less than it is allowed to, at its
                end or because it was asked to.
        """
        if not self._max_drafts:
            return
        self._num_steps += 1
        for made, taken in zip(drafted, accepted, strict=True):
            self._count(made, taken)
        bucket = self._bucket(num_sequences)
        step = _Step(self._num_steps, seconds / num_sequences, tuple(drafted))
        if bucket.trial is None:
            bucket.steps.append(step)
            self._watch(bucket)
        else:
            self._go_on(bucket, bucket.trial, step)

    @property
    def is_futile(self) -> bool:
        """Whether drafts cost more than they could ever give, in all batch sizes that were tried."""
        tried = [each.num_futile for each in self._buckets.values() if each.num_futile is not None]
        return bool(tried) and min(tried) >= FUTILE_TRIALS

    def pays(self, num_sequences: int) -> bool:
        """Whether drafts are the usual thing in steps of so many."""
        return bool(self._max_drafts) and self._bucket(num_sequences).usual > 0

    def acceptance(self, depth: int) -> float:
        """Share of drafts at `depth` (from 0) that are accepted where the ones before it are; 1 while unknown: it is
        found out by trying."""
        tried = self._tried[depth]
        return self._accepted[depth] / tried if tried else 1.0

    def tokens(self, num_drafts: int) -> float:
        """Expected tokens of a sequence and step."""
        total, chance = 1.0, 1.0
        for depth in range(num_drafts):
            chance *= self.acceptance(depth)
            total += chance
        return total

    # Between trials

    def _watch(self, bucket: _Bucket) -> None:
        """Drafts that are accepted too seldom end at once; the next trial begins when it is time."""
        bucket.until_trial -= 1
        if bucket.usual and not self._pays(bucket):
            self._take(bucket, 0)
        if bucket.until_trial <= 0:
            bucket.trial = _Trial(self._candidate(bucket))
            self._discount(range(bucket.usual, bucket.trial.drafts))

    def _pays(self, bucket: _Bucket) -> bool:
        """Whether the usual drafts are worth their time, as far as that is known."""
        step = bucket.steps[-1]
        if not bucket.costs or not step.made:
            return True
        num_made = statistics.fmean(step.made)
        return MARGIN * self._tokens(step) >= 1 + statistics.median(bucket.costs) * num_made

    def _candidate(self, bucket: _Bucket) -> int:
        """What to try next: one draft more, one less, or none, in turn."""
        near = {bucket.usual + 1, bucket.usual - 1, 0} - {bucket.usual}
        allowed = [drafts for drafts in sorted(near, reverse=True) if 0 <= drafts <= self._max_drafts]
        bucket.num_trials += 1
        return allowed[(bucket.num_trials - 1) % len(allowed)]

    # Trials

    def _go_on(self, bucket: _Bucket, trial: _Trial, step: _Step) -> None:
        if trial.num_left:
            if trial.num_left < TRIAL_STEPS:
                trial.steps.append(step)
            trial.num_left -= 1
            return
        if trial.num_after < AFTER_STEPS:
            bucket.steps.append(step)
        trial.num_after -= 1
        if not trial.num_after:
            bucket.trial = None
            self._settle(bucket, trial)

    def _settle(self, bucket: _Bucket, trial: _Trial) -> None:
        """Takes the better of both numbers. After a trial that changed nothing, be slower to try again."""
        bucket.interval = min(MAX_TRIAL_INTERVAL, 2 * bucket.interval)
        bucket.until_trial = bucket.interval
        tried, usual = self._recent(trial.steps), self._recent(bucket.steps)
        if len(tried) < TRIAL_STEPS // 2 or len(usual) < USUAL_STEPS // 2:
            return  # steps of other batch sizes came between
        ratio = _seconds(tried) / _seconds(usual)
        usual_cost = 1.0
        if bucket.usual and not trial.drafts:
            usual_cost = 1 / ratio
            _note_cost(bucket, usual_cost, usual)
        elif bucket.usual and bucket.costs:
            usual_cost = 1 + statistics.median(bucket.costs) * _num_made(usual)
        if not bucket.usual and (num_made := _num_made(tried)):
            bucket.num_futile = (bucket.num_futile or 0) + 1 if ratio > 1 + num_made else 0
        if self._mean_tokens(tried) > MARGIN * ratio * self._mean_tokens(usual):
            self._take(bucket, trial.drafts)
            _note_cost(bucket, ratio * usual_cost, tried)

    def _take(self, bucket: _Bucket, num_drafts: int) -> None:
        bucket.usual = num_drafts
        bucket.steps.clear()
        bucket.costs.clear()
        bucket.interval = bucket.until_trial = MIN_TRIAL_INTERVAL
        bucket.num_trials = 0

    # What is known

    def _recent(self, steps: Iterable[_Step]) -> list[_Step]:
        return [step for step in steps if step.number > self._num_steps - WINDOW_STEPS]

    def _mean_tokens(self, steps: Sequence[_Step]) -> float:
        return statistics.fmean(self._tokens(step) for step in steps)

    def _tokens(self, step: _Step) -> float:
        """That such a step may be expected to give a sequence."""
        return statistics.fmean(map(self.tokens, step.made)) if step.made else 1.0

    def _count(self, made: int, taken: int) -> None:
        keep = 0.5 ** (1 / ACCEPTANCE_HALF_LIFE)
        for depth in range(min(made, taken + 1)):
            self._tried[depth] = self._tried[depth] * keep + 1
            self._accepted[depth] = self._accepted[depth] * keep + (depth < taken)

    def _discount(self, depths: Iterable[int]) -> None:
        for depth in depths:
            weight = min(1.0, OLD_DRAFTS / self._tried[depth]) if self._tried[depth] else 1.0
            self._tried[depth] *= weight
            self._accepted[depth] *= weight

    def _bucket(self, num_sequences: int) -> _Bucket:
        """Batch sizes 1, 2, 3-4, 5-8, 9-16 ... share what is measured."""
        return self._buckets.setdefault((num_sequences - 1).bit_length(), _Bucket())


def _seconds(steps: Iterable[_Step]) -> float:
    """Of one, and of a sequence in it."""
    return statistics.median(step.seconds for step in steps)


def _num_made(steps: Iterable[_Step]) -> float:
    """Drafts of a sequence in one step."""
    return statistics.fmean(count for step in steps for count in step.made)


def _note_cost(bucket: _Bucket, step_cost: float, steps: Sequence[_Step]) -> None:
    """`step_cost`: of these steps, in steps without drafts."""
    num_made = _num_made(steps)
    if num_made:
        bucket.costs.append((step_cost - 1) / num_made)
