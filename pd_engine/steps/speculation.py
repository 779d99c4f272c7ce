"""How many drafts a decode step makes: as many as pay, none where none pays. Pure: durations in, a number out.

With `a_j` the measured share of steps whose draft j is accepted, given that the ones before it are, k drafts give

    tokens(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k

tokens a sequence (Leviathan et al. 2023, section 3.1, with a rate of its own for each depth), and a step of so many
sequences takes a measured time: k is chosen for the most tokens a second. Tokens themselves never depend on it.

What is not run is not measured: now and then a few steps run with another number of drafts than the best known one,
ever more seldom while that turns out worse.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

PROBE_STEPS = 4            # of one trial; the first one is not counted: it has drafts to catch up with
FIRST_PROBE_AFTER = 16     # steps of a batch size
MIN_PROBE_INTERVAL = 64    # steps between two trials of a batch size
MAX_PROBE_INTERVAL = 512   # while trials turn out worse
MARGIN = 1.03              # another number of drafts must be so much better
KEPT_DURATIONS = 15        # the last ones of a batch size and number of drafts; their median counts
FULL_SHARE = 0.75          # of the sequences must have made that many drafts, or the step says nothing of the number
ACCEPTANCE_HALF_LIFE = 64.0  # drafts


@dataclass(slots=True)
class _Bucket:
    """What is known of one range of batch sizes.

    Attributes:
        seconds: of a step and sequence, by number of drafts.
        interval: steps until the next trial after the last.
        until_probe: steps that are left until it.
        probing: (drafts, steps left) of the trial that runs.
        num_trials: so far.
    """

    seconds: dict[int, deque[float]] = field(default_factory=dict)
    best: int = 0
    interval: int = MIN_PROBE_INTERVAL
    until_probe: int = FIRST_PROBE_AFTER
    probing: tuple[int, int] | None = None
    num_trials: int = -1


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
        self._last_drafts = -1

    def choose(self, num_sequences: int) -> int:
        """Drafts that each sequence of the next step shall make at most."""
        if not self._max_drafts:
            return 0
        bucket = self._bucket(num_sequences)
        return bucket.best if bucket.probing is None else bucket.probing[0]

    def record(self, num_sequences: int, num_drafts: int, seconds: float, drafted: Sequence[int],
               accepted: Sequence[int]) -> None:
        """A step is done.

        Args:
            num_drafts: what `choose` said.
            drafted, accepted: of each sequence; one may draft less than it is allowed to, at its end or because it was
                asked to.
        """
        if not self._max_drafts:
            return
        for made, taken in zip(drafted, accepted, strict=True):
            self._count(made, taken)
        bucket = self._bucket(num_sequences)
        is_settled = self._last_drafts == num_drafts
        self._last_drafts = num_drafts
        num_full = sum(made == num_drafts for made in drafted)
        if is_settled and num_full >= FULL_SHARE * num_sequences:
            bucket.seconds.setdefault(num_drafts, deque(maxlen=KEPT_DURATIONS)).append(seconds / num_sequences)
        self._advance(bucket)

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

    def _advance(self, bucket: _Bucket) -> None:
        if bucket.probing is not None:
            drafts, left = bucket.probing
            bucket.probing = (drafts, left - 1) if left > 1 else None
            if bucket.probing is None:
                self._settle(bucket)
            return
        bucket.until_probe -= 1
        if bucket.best and self._rate(bucket, bucket.best) * MARGIN < self._rate(bucket, 0):
            self._settle(bucket)  # drafts are accepted less often than they were
        if bucket.until_probe <= 0:
            bucket.probing = (self._candidate(bucket), PROBE_STEPS)

    def _settle(self, bucket: _Bucket) -> None:
        """Take the best of what is measured. After a trial that changed nothing, be slower to try again."""
        before = bucket.best
        now = max(bucket.seconds, key=lambda drafts: self._rate(bucket, drafts), default=before)
        if self._rate(bucket, now) > MARGIN * self._rate(bucket, before):
            bucket.best = now
        changed = bucket.best != before
        bucket.interval = MIN_PROBE_INTERVAL if changed else min(MAX_PROBE_INTERVAL, 2 * bucket.interval)
        bucket.until_probe = bucket.interval

    def _candidate(self, bucket: _Bucket) -> int:
        """What to try next: one draft more, one less, or none, in turn."""
        near = {bucket.best + 1, bucket.best - 1, 0} - {bucket.best}
        allowed = [drafts for drafts in sorted(near, reverse=True) if 0 <= drafts <= self._max_drafts]
        bucket.num_trials += 1
        return allowed[bucket.num_trials % len(allowed)]

    def _rate(self, bucket: _Bucket, num_drafts: int) -> float:
        """Tokens a second and sequence; 0 while not measured."""
        known = bucket.seconds.get(num_drafts)
        return self.tokens(num_drafts) / statistics.median(known) if known else 0.0

    def _count(self, made: int, taken: int) -> None:
        keep = 0.5 ** (1 / ACCEPTANCE_HALF_LIFE)
        for depth in range(min(made, taken + 1)):
            self._tried[depth] = self._tried[depth] * keep + 1
            self._accepted[depth] = self._accepted[depth] * keep + (depth < taken)

    def _bucket(self, num_sequences: int) -> _Bucket:
        """Batch sizes 1, 2, 3-4, 5-8, 9-16 ... share what is measured."""
        return self._buckets.setdefault((num_sequences - 1).bit_length(), _Bucket())
