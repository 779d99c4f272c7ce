"""Rotary position embedding with YaRN: the table of angles, and the softmax scale that goes with it.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071), sections 3.1-3.4; DeepSeek-V3's `inference/model.py`
(`precompute_freqs_cis`). Scaling is always on, for short contexts too, as Hugging Face and vLLM do it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_engine.model.config import ModelConfig, YarnScaling

_TABLE_ROWS = 4096  # at a time, so that fp64 never holds the whole table


def inverse_frequencies(config: ModelConfig) -> npt.NDArray[np.float32]:
    """f_i = theta^(-2i/R) for the R/2 pairs; with YaRN, slowed by `factor` where a pair turns less than `beta_slow`
    times within the original context, untouched above `beta_fast` turns, and a linear ramp between."""
    dim = config.qk_rope_head_dim
    frequencies = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    yarn = config.rope_scaling
    if yarn is not None:
        ramp = _yarn_ramp(dim, config.rope_theta, yarn)
        frequencies = frequencies / yarn.factor * ramp + frequencies * (1 - ramp)
    return frequencies.astype(np.float32)


def _yarn_ramp(dim: int, theta: float, yarn: YarnScaling) -> npt.NDArray[np.float64]:
    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = float(min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1))
    if high == low:
        high += 0.001  # beta_fast == beta_slow: a step instead of a ramp, as in DeepSeek's code
    return np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)


def rope_table(config: ModelConfig, num_positions: int) -> Tensor:
    """rope_P2R for `num_positions` positions: float32 [P, 2, R/2], cosines then sines of position · f_i.

    The angle is rounded to fp32 as in the reference code, which the models were trained with; sine and cosine are
    computed in fp64 and rounded once, so that the table has the same bits on every host.
    """
    frequencies, magnitude = inverse_frequencies(config), _magnitude(config.rope_scaling)
    table = np.empty((num_positions, 2, len(frequencies)), dtype=np.float32)
    for start in range(0, num_positions, _TABLE_ROWS):
        rows = table[start : start + _TABLE_ROWS]
        positions = np.arange(start, start + len(rows), dtype=np.float32)
        angles = np.outer(positions, frequencies).astype(np.float64)
        rows[:, 0], rows[:, 1] = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    return torch.from_numpy(table)


def rope_table_bytes(config: ModelConfig, num_positions: int) -> int:
    return num_positions * config.qk_rope_head_dim * np.dtype(np.float32).itemsize


def softmax_scale(config: ModelConfig) -> float:
    """σ = (N + R)^-1/2 · m², m of `mscale_all_dim`. It is of the head, not of the 576 numbers of the absorbed key."""
    scale = 1 / math.sqrt(config.qk_head_dim)
    if config.rope_scaling is not None:
        scale *= _mscale(config.rope_scaling.factor, config.rope_scaling.mscale_all_dim) ** 2
    return scale


def _magnitude(yarn: YarnScaling | None) -> float:
    """What multiplies sines and cosines: 1 where mscale equals mscale_all_dim."""
    if yarn is None:
        return 1.0
    return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
