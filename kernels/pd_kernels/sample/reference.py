"""The token of a row: argmax of its processed logits plus noise that depends on (seed, position, entry) alone.

Every step is exact or one IEEE operation in a stated order, so that all implementations choose the same token from
the same logits:

1. z = logits; NaN counts as -inf. A temperature below `MIN_TEMPERATURE` is greedy: argmax, ties to the lowest index.
2. z = z / temperature, float32.
3. min-p: an entry stays if z - max z >= log(min_p) (elementary.log), or if z = max z. That is, if it is at least min_p
   times as likely as the best one; in this form the entries that stay are the first ones of the ranking.
4. top-k: the k best of these stay; equal ones are ranked by lowest index.
5. top-p: p = exp(z - max z) (elementary.exp) of the entries that stay, as float64. In rank order an entry stays
   while the sum of those before it is < top_p · total. `total` is `sum_lanes` over the vocabulary (0 for entries
   that are out), the running sum is sequential. The best entry always stays.
6. u = ((word >> 9) + 0.5) · 2^-23, exact in float32, in (0, 1); gumbel = -log(-log u) (elementary.log). The token
   is the argmax of z + gumbel among the entries that stay, ties to the lowest index.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_kernels.elementary import reference as elementary
from pd_kernels.ops import SamplingRows
from pd_kernels.sample.philox import Words, position_words

MIN_TEMPERATURE = 1e-5
NUM_LANES = 8

Row = npt.NDArray[np.float32]


def sample(logits_TZ: Tensor, rows: SamplingRows) -> npt.NDArray[np.int32]:
    """The token of each row of float32 logits."""
    tokens = np.empty(logits_TZ.shape[0], dtype=np.int32)
    for t, logits_Z in enumerate(logits_TZ.numpy()):
        tokens[t] = _sample_row(
            logits_Z, float(rows.temperature_T[t]), int(rows.top_k_T[t]), float(rows.top_p_T[t]),
            float(rows.min_p_T[t]), int(rows.seed_T[t]), int(rows.position_T[t]),
        )
    return tokens


def logprobs(logits_TZ: Tensor) -> npt.NDArray[np.float32]:
    """log softmax: float32(z - (max + ln Σ exp(z - max))), the sum by `sum_lanes` and the rest in float64."""
    logits = logits_TZ.numpy()
    result = np.empty_like(logits)
    for t, logits_Z in enumerate(logits):
        maximum = logits_Z.max()
        total = sum_lanes(_exp(logits_Z - maximum).astype(np.float64))
        result[t] = logits_Z.astype(np.float64) - (float(maximum) + math.log(total))
    return result


def gumbel(words: Words) -> Row:
    """Noise of the standard Gumbel distribution from uniform words, float32."""
    uniform = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -elementary.log(-elementary.log(uniform))


def sum_lanes(x: npt.NDArray[np.float64]) -> float:
    """Lane i sums x[i], x[i + 8], ... in order; then the lanes are summed in order."""
    padded = np.zeros(-(-len(x) // NUM_LANES) * NUM_LANES)
    padded[: len(x)] = x
    lanes = np.add.accumulate(padded.reshape(-1, NUM_LANES), axis=0)[-1]
    return float(np.add.accumulate(lanes)[-1])


def kept_entries(z: Row, top_k: int, top_p: float, min_p: float = 0.0) -> npt.NDArray[np.int64]:
    """Indices of the entries that min-p, then top-k and then top-p leave, in no particular order."""
    limit_k = 0 < top_k < len(z)
    if not limit_k and top_p >= 1.0 and min_p <= 0.0:
        return np.arange(len(z))
    order = np.argsort(-z, kind="stable")
    if min_p > 0.0:
        order = order[: _num_likely(z, min_p)]
    if limit_k:
        order = order[:top_k]
    if top_p >= 1.0:
        return order
    p = np.zeros(len(z))
    with np.errstate(invalid="ignore"):  # a row of -inf alone: p is NaN, and the first entry stays
        p[order] = _exp(z[order] - z[order[0]])
    sum_before = np.concatenate([[0.0], np.add.accumulate(p[order])[:-1]])
    stays = sum_before < float(np.float32(top_p)) * sum_lanes(p)
    return order[: max(1, int(np.argmin(stays)) if not stays.all() else len(order))]


def _num_likely(z: Row, min_p: float) -> int:
    best = z.max()
    threshold = elementary.log(np.array([min_p], dtype=np.float32))[0]
    with np.errstate(invalid="ignore"):  # infinity - infinity
        return int(np.count_nonzero((z - best >= threshold) | (z == best)))


def _sample_row(
    logits_Z: Row, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    z = np.where(np.isnan(logits_Z), np.float32(-np.inf), logits_Z)
    if temperature < MIN_TEMPERATURE:
        return int(np.argmax(z))
    z = np.divide(z, np.float32(temperature), dtype=np.float32)
    kept = np.sort(kept_entries(z, top_k, top_p, min_p))
    noisy = z[kept] + gumbel(position_words(seed, position, len(z)))[kept]
    return int(kept[np.argmax(noisy)])


def _exp(x: Row) -> Row:
    result: Row = elementary.exp(torch.from_numpy(np.ascontiguousarray(x))).numpy()
    return result
