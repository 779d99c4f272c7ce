"""From rows of h to tokens: position-keyed sampling, and logprobs where they were asked for."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pd_engine.sequence import Sequence, TokenLogprobs
from pd_kernels.ops import Ops, SamplingRows


def sample_rows(ops: Ops, logits_TZ: Tensor, sequences: Seq[Sequence], positions: Seq[int]) -> list[int]:
    """The token of each row. `positions` are those of the tokens being sampled: they key the noise, so the same
    token comes out whether the row drafts, verifies, continues a stream or replays it."""
    params = [sequence.params for sequence in sequences]
    rows = SamplingRows(
        temperature_T=np.array([p.temperature for p in params], dtype=np.float32),
        top_k_T=np.array([p.top_k for p in params], dtype=np.int32),
        top_p_T=np.array([p.top_p for p in params], dtype=np.float32),
        seed_T=np.array([p.seed for p in params], dtype=np.uint64),
        position_T=np.array(positions, dtype=np.int64),
    )
    return [int(token) for token in ops.sample(logits_TZ, rows)]


def token_logprobs(
    ops: Ops, logits_TZ: Tensor, token_ids: Seq[int], num_tops: Seq[int | None]
) -> list[TokenLogprobs | None]:
    """Logprobs of the sampled tokens; None for rows whose `num_tops` is None."""
    wanted = [row for row, num_top in enumerate(num_tops) if num_top is not None]
    result: list[TokenLogprobs | None] = [None] * len(num_tops)
    if wanted:
        for row, logprobs_Z in zip(wanted, ops.logprobs(logits_TZ[wanted].contiguous()), strict=True):
            num_top = num_tops[row]
            assert num_top is not None
            result[row] = TokenLogprobs(logprob=float(logprobs_Z[token_ids[row]]), top=_top(logprobs_Z, num_top))
    return result


def _top(logprobs_Z: npt.NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` largest as (token id, logprob), best first, ties to the lowest id. NaN counts as the smallest."""
    count = min(count, len(logprobs_Z))
    if count == 0:
        return ()
    values = np.where(np.isnan(logprobs_Z), np.float32(-np.inf), logprobs_Z)
    threshold = np.partition(values, -count)[-count]
    candidates = np.flatnonzero(values >= threshold)
    best = candidates[np.argsort(-values[candidates], kind="stable")][:count]
    return tuple((int(token), float(logprobs_Z[token])) for token in best)
