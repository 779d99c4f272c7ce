"""What prompts cost, from when requests were sent and when their first tokens came.

Under load a prompt's own time says little: it holds what was ahead of it, and steps that it shared with others. What
does not depend on who went first is how long a prefill worker was at it: from when a prompt comes to an idle one until
nobody waits any more it computes all that came meanwhile, in whatever order. Such a stretch is a sum over the tokens of
its prompts, and over the pairs of tokens that attention compares; one prompt alone is the shortest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pd_ops.bench.serve.record import Record
from pd_ops.bench.serve.request_parts import num_pairs, served_ttft_ms, uncached_tokens

FEWEST_STRETCHES = 8  # to tell doors, tokens and pairs apart
MAX_CONDITION = 1e3   # of what is told apart: beyond it prompts are too much alike
FAR = 3.0             # times the median distance to the fit: what is farther pulls no more than what is as far
NUM_ROUNDS = 20       # of weighing anew

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Requests whose first tokens were waited for at the same time, until nobody waited.

    Attributes:
        busy_ms: added up over as many workers as had something to compute, with `num_doors` times what hangs neither on
            prompts nor on what waits.
        tokens, pairs: to compute; the second of each of these with every token before it.
        is_lone: one prompt that had a worker for itself.
    """

    busy_ms: float
    num_doors: int
    tokens: int
    pairs: float
    is_lone: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCosts:
    """Milliseconds; nothing is below 0.

    Attributes:
        late: by how much later than that first tokens of lone prompts came, over the root of what they should take.
        num_stretches: that were seen.
        tells_doors: prompts were different enough to tell what hangs on them from what does not; else all does.
    """

    door_ms: float
    ms_per_token: float
    ms_per_pair: float
    late: tuple[float, ...]
    num_stretches: int
    tells_doors: bool


def prompt_costs(records: Sequence[Record], num_workers: int) -> PromptCosts:
    """Least squares over stretches. A stretch varies as a sum of its parts does, so it counts by the inverse of its
    length. Of few stretches no pairs are told, and of fewer no doors.

    Args:
        records: with a first token each; one at least.
    """
    seen = stretches(records, num_workers)
    columns = np.array([(one.num_doors, one.tokens, one.pairs) for one in seen], dtype=np.float64)
    ms = np.array([one.busy_ms for one in seen])
    kept = _told_apart(columns, ms)
    costs = _solve(columns, ms, kept)
    expected = np.maximum(columns @ costs, 1.0)
    late = tuple(
        float((one.busy_ms - should) / math.sqrt(should)) for one, should in zip(seen, expected, strict=True)
        if one.is_lone
    )
    door, token, pair = (float(cost) for cost in costs)
    return PromptCosts(
        door_ms=door, ms_per_token=token, ms_per_pair=pair, late=late, num_stretches=len(seen), tells_doors=0 in kept
    )


def stretches(records: Sequence[Record], num_workers: int) -> list[Stretch]:
    """Some after the other. What several workers had to share is taken as if none of them was idle meanwhile. Where the
    router told a prompt of a queue that has none of these before it, others stood there."""
    found: list[list[Record]] = []
    end_s = -math.inf
    for record in sorted(records, key=lambda one: one.sent_s):
        if record.sent_s > end_s:
            found.append([])
        found[-1].append(record)
        end_s = max(end_s, record.arrivals[0][0])
    return [stretch for together in found for stretch in _stretches_of(together, num_workers)]


def _stretches_of(together: Sequence[Record], num_workers: int) -> list[Stretch]:
    """Prompts that never were more than the workers had one each: every one is a stretch."""
    if len(together) == 1:
        [one] = together
        return [_stretch(together, max(0.0, served_ttft_ms(one) - (one.queue_ms or 0.0)) / 1e3, num_doors=1)]
    changes = sorted([(one.sent_s, 1) for one in together] + [(one.arrivals[0][0], -1) for one in together])
    num_open = most_open = 0
    busy_s, before_s = 0.0, changes[0][0]
    for at_s, change in changes:
        busy_s += min(num_open, num_workers) * (at_s - before_s)
        before_s = at_s
        num_open += change
        most_open = max(most_open, num_open)
    if most_open <= num_workers:
        return [_stretch([one], served_ttft_ms(one) / 1e3, num_doors=1) for one in together]
    return [_stretch(together, busy_s, num_doors=num_workers)]


def _stretch(records: Sequence[Record], busy_s: float, *, num_doors: int) -> Stretch:
    return Stretch(
        busy_ms=1e3 * busy_s, num_doors=num_doors, tokens=sum(uncached_tokens(one) for one in records),
        pairs=sum(num_pairs(one) for one in records), is_lone=len(records) == 1,
    )


def _told_apart(columns: Floats, ms: Floats) -> tuple[int, ...]:
    """Columns of which there are enough rows, different enough from each other."""
    rows = columns / np.sqrt(np.maximum(ms, 1.0))[:, None]
    rows = rows / np.maximum(np.linalg.norm(rows, axis=0), 1e-12)
    for kept, fewest in (((0, 1, 2), FEWEST_STRETCHES), ((0, 1), 3)):
        if len(ms) >= fewest and float(np.linalg.cond(rows[:, kept])) <= MAX_CONDITION:
            return kept
    return (1,)


def _solve(columns: Floats, ms: Floats, kept: Sequence[int]) -> Floats:
    """What is below 0 shows too little, and is left out."""
    left = list(kept)
    while True:
        found = _robust(columns[:, left], ms)
        if len(left) == 1 or float(found.min()) >= 0:
            costs = np.zeros(columns.shape[1])
            costs[left] = np.maximum(found, 0.0)
            return costs
        left.pop(int(np.argmin(found)))


def _robust(columns: Floats, ms: Floats) -> Floats:
    """Least squares with weights of Huber's (1964), by rounds."""
    scale = 1 / np.sqrt(np.maximum(ms, 1.0))
    weights, costs = np.ones(len(ms)), np.zeros(columns.shape[1])
    for _ in range(NUM_ROUNDS):
        rows = scale * weights
        found, *_ = np.linalg.lstsq(columns * rows[:, None], ms * rows, rcond=None)
        costs = found.astype(np.float64)
        rests = np.abs(ms - columns @ costs) * scale
        far = FAR * max(float(np.median(rests)), 1e-9)
        weights = np.sqrt(far / np.maximum(rests, far))
    return costs
