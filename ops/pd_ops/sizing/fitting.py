"""A cost model from what `bench serve` measured: how long prompts kept prefill workers busy, times between tokens over
how many streams ran, and second tokens that came late.

It sees what clients see, the noise of the machine and of its neighbours included: how both kinds of work spread around
the fitted line is kept, and drawn from.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.prompt_costs import FEWEST_STRETCHES, PromptCosts, prompt_costs
from pd_ops.bench.serve.record import Record
from pd_ops.bench.serve.result import Result
from pd_ops.sizing.cost_model import CostModel

FEWEST_REQUESTS, FEWEST_STEPS = 10, 50
NUM_QUANTILES = 41
MAX_STEPS = 50_000  # looked at
EDGE = 0.005  # of a spread, cut off at both ends: one stall of the machine is no law

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """One time between tokens each: how long a step was, and how many sequences and slots a decode worker had then."""

    ms: Floats
    sequences: Floats
    slots: Floats


def fit(result: Result) -> CostModel:
    """Raises:
    InvalidArgument: it tells of too few requests, of no decode worker, or has no records.
    """
    known = [record for record in result.finished if record.arrivals]
    topology = result.identity.get("topology") or {}
    num_prefill, num_decode = topology.get("prefill"), topology.get("decode")
    if len(known) < FEWEST_REQUESTS or not isinstance(num_decode, int) or num_decode < 1:
        raise InvalidArgument(
            f"{result.path}: a fit needs records.jsonl with at least {FEWEST_REQUESTS} finished requests, and a "
            f"topology with decode workers; there are {len(known)} and {num_decode}"
        )
    prompts = prompt_costs(known, num_prefill if isinstance(num_prefill, int) and num_prefill > 0 else num_decode)
    tokens_per_step = _tokens_per_step(known)
    steps = steps_of(known, num_decode, tokens_per_step)
    if len(steps.ms) < FEWEST_STEPS:
        raise InvalidArgument(
            f"{result.path}: a fit needs {FEWEST_STEPS} times between tokens, there are {len(steps.ms)}"
        )
    base_ms, sequence_ms, slot_ms = plane(steps)
    expected = base_ms + sequence_ms * steps.sequences + slot_ms * steps.slots
    late_ms = [record.handoff_wait_ms or 0.0 for record in known]
    return CostModel(
        source=f"fitted from {len(known)} requests of {result.identity['engine']}, {result.identity['host']['date']}",
        door_ms=prompts.door_ms, prefill_ms_per_token=max(prompts.ms_per_token, 1e-6),
        prefill_ms_per_pair=prompts.ms_per_pair, decode_step_ms=base_ms,
        decode_ms_per_sequence=sequence_ms, decode_ms_per_slot=slot_ms, handoff_ms=statistics.median(late_ms),
        tokens_per_step=tokens_per_step, decode_spread=_spread(steps.ms / np.maximum(expected, 1e-9)),
        first_late=_spread(np.array(prompts.late if len(prompts.late) >= FEWEST_REQUESTS else [0.0])),
        most_prompt_tokens=max(record.prompt_tokens for record in known),
        most_sequences=float(np.quantile(steps.sequences, 1 - EDGE)), fit_limit=_limit(prompts, known),
    )


def _tokens_per_step(records: Sequence[Record]) -> float:
    """1, and what drafts added; where the endpoint tells nothing of drafts, 1."""
    told = [record for record in records if record.num_accepted is not None]
    tokens = sum(record.completion_tokens - 1 for record in told)
    steps = tokens - sum(record.num_accepted or 0 for record in told)
    return tokens / steps if steps > 0 else 1.0


def steps_of(records: Sequence[Record], num_decode: int, tokens_per_step: float) -> Steps:
    """Second tokens are left out: a handoff is in them. The workers of a pool are taken as equally full."""
    begins = np.array([record.arrivals[0][0] for record in records])
    ends = np.array([record.arrivals[-1][0] for record in records])
    slots = np.array([record.prompt_tokens + record.completion_tokens / 2 for record in records])
    at, ms = [], []
    for record in records:
        for (before_s, _), (after_s, count) in itertools.pairwise(record.arrivals[1:]):
            at.append((before_s + after_s) / 2)
            ms.append(1e3 * (after_s - before_s) * tokens_per_step / count)
    every = max(1, len(at) // MAX_STEPS)
    times = np.array(at[::every])

    def running(weights: Floats) -> Floats:
        """Sum of the weights of streams that run at each time."""
        totals = np.zeros(len(times))
        for sign, moments in ((1.0, begins), (-1.0, ends)):
            order = np.argsort(moments)
            sums = np.concatenate([[0.0], np.cumsum(weights[order])])
            totals += sign * sums[np.searchsorted(moments[order], times, side="right")]
        return np.maximum(totals, 0.0) / num_decode

    return Steps(ms=np.array(ms[::every]), sequences=running(np.ones(len(records))), slots=running(slots))


def plane(steps: Steps) -> tuple[float, float, float]:
    """ms of a step, of a sequence and of a slot, none below 0: least squares over the medians of steps alike, each by
    how many there are. What does not show, as batches hardly differed, is in the first."""
    keys = np.stack([np.round(steps.sequences), np.round(np.log2(np.maximum(steps.slots, 1.0)) * 2)], axis=1)
    cells, cell_of = np.unique(keys, axis=0, return_inverse=True)
    cell_of = cell_of.reshape(-1)
    chosen = [np.flatnonzero(cell_of == number) for number in range(len(cells))]
    weights = np.sqrt([float(len(rows)) for rows in chosen])
    ms = np.array([np.median(steps.ms[rows]) for rows in chosen])
    columns = [np.ones(len(cells)), np.array([steps.sequences[rows].mean() for rows in chosen]),
               np.array([steps.slots[rows].mean() for rows in chosen])]
    kept = [0, 1, 2] if len(cells) >= 6 else [0, 1] if len(cells) >= 3 else [0]
    while True:
        matrix = np.stack([columns[index] for index in kept], axis=1)
        found, *_ = np.linalg.lstsq(matrix * weights[:, None], ms * weights, rcond=None)
        if len(kept) == 1 or float(found.min()) >= 0:
            break
        kept.pop(int(np.argmin(found)) if len(kept) > 1 else 0)
    values = dict(zip(kept, (float(value) for value in found), strict=True))
    return values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)


def _limit(prompts: PromptCosts, records: Sequence[Record]) -> str:
    """In words, of what the measurement tells too little."""
    if prompts.num_stretches < FEWEST_STRETCHES:
        return (f"prompts were waited for almost all the time: {len(records)} in {prompts.num_stretches} stretches, "
                f"{FEWEST_STRETCHES} are needed to tell doors, tokens and contexts apart; measure at a lower rate")
    if not prompts.tells_doors:
        return "prompts were too much alike to tell what hangs on their length: all of it is taken to"
    return ""


def _spread(values: Floats) -> tuple[float, ...]:
    shares = np.linspace(EDGE, 1 - EDGE, NUM_QUANTILES)
    return tuple(round(float(value), 4) for value in np.quantile(values, shares))
