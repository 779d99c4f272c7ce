"""Angles and softmax scale against the numbers of DeepSeek-V3, and against the formula written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pd_engine.model.config import ModelConfig
from pd_engine.model.rope import inverse_frequencies, rope_table, softmax_scale
from support.engine_cases import YARN_KIMI
from support.engine_v3_config import DEEPSEEK_V3


def config(**overrides: Any) -> ModelConfig:
    return ModelConfig.parse(DEEPSEEK_V3 | overrides)


def test_softmax_scale_of_deepseek_v3() -> None:
    assert softmax_scale(config()) == pytest.approx(0.1352337788608801, rel=1e-15)
    assert softmax_scale(config(rope_scaling=None)) == pytest.approx(192**-0.5, rel=1e-15)


def test_yarn_ramp_of_deepseek_v3_goes_from_pair_10_to_23() -> None:
    plain = inverse_frequencies(config(rope_scaling=None))
    scaled = inverse_frequencies(config())
    ratio = plain / scaled
    assert ratio[:11] == pytest.approx(1.0)
    assert ratio[23:] == pytest.approx(40.0)
    ramp = (np.arange(32) - 10) / 13
    between = slice(11, 23)
    assert 1 / ratio[between] == pytest.approx(ramp[between] / 40 + 1 - ramp[between], rel=1e-6)


def test_equal_betas_make_a_step() -> None:
    """Kimi-K2's beta_fast = beta_slow = 1: pairs are scaled or not, none in between."""
    kimi = YARN_KIMI | {"original_max_position_embeddings": 4096}
    ratio = inverse_frequencies(config(rope_scaling=None)) / inverse_frequencies(config(rope_scaling=kimi))
    assert all(math.isclose(value, 1, rel_tol=1e-5) or math.isclose(value, 32, rel_tol=1e-5) for value in ratio)
    assert ratio[0] == pytest.approx(1)
    assert ratio[-1] == pytest.approx(32)


def test_table_is_cosine_and_sine_of_position_times_frequency() -> None:
    table = rope_table(config(), 300)
    assert table.shape == (300, 2, 32)
    frequency = float(inverse_frequencies(config())[3])
    angle = float(np.float32(np.float32(299) * np.float32(frequency)))
    assert float(table[299, 0, 3]) == pytest.approx(math.cos(angle), abs=1e-7)
    assert float(table[299, 1, 3]) == pytest.approx(math.sin(angle), abs=1e-7)
    assert table[0, 0].tolist() == [1.0] * 32
    assert table[0, 1].tolist() == [0.0] * 32


@pytest.mark.parametrize(("mscale", "all_dim", "magnitude"), [(1.0, 1.0, 1.0), (1.0, 0.0, 0.1 * math.log(40) + 1)])
def test_magnitude_of_the_table(mscale: float, all_dim: float, magnitude: float) -> None:
    scaling = DEEPSEEK_V3["rope_scaling"] | {"mscale": mscale, "mscale_all_dim": all_dim}
    assert float(rope_table(config(rope_scaling=scaling), 1)[0, 0, 0]) == pytest.approx(magnitude, rel=1e-6)
