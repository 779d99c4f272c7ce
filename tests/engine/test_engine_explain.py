"""Parameters and FLOPs against closed forms, for DeepSeek-V3's own config and for checkpoints that are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_engine.engine import Engine
from pd_engine.explain import Explanation, explain_model
from pd_engine.model.checkpoint import check_tensors, stored_tensors
from pd_engine.model.config import ModelConfig
from pd_engine.model.tensors import checkpoint_tensors
from support.engine_cases import CONFIGS
from support.engine_v3_config import DEEPSEEK_V3

V3 = ModelConfig.parse(DEEPSEEK_V3)

D, H, N, R, V, C, LQ, Z = 7168, 128, 128, 64, 128, 512, 1536, 129280
ATTENTION = D * LQ + LQ + LQ * H * (N + R) + D * (C + R) + C + C * H * (N + V) + H * V * D
EXPERT = 3 * D * 2048
MOE = 256 * D + 256 + 257 * EXPERT
DENSE = 3 * D * 18432
MAIN = 2 * Z * D + D + 61 * (ATTENTION + 2 * D) + 3 * DENSE + 58 * MOE
MTP = ATTENTION + 2 * D + MOE + 2 * D * D + 3 * D


def test_deepseek_v3_has_671_billion_parameters() -> None:
    explanation = explain_model(V3, num_tokens=1)
    assert explanation.parameters == MAIN == 671_026_419_200
    assert explanation.mtp_parameters == MTP
    assert explanation.active_parameters == MAIN - 58 * 248 * EXPERT
    assert round(explanation.active_parameters / 1e9, 1) == 37.6  # "37B", with the embedding
    assert explanation.cache_bytes_per_token == 62 * 576 * 2


def test_names_and_elements_are_those_of_the_published_checkpoint() -> None:
    """91,991 tensors with 684,531,386,000 elements, the FP8 scales and MTP's copies included."""
    specs = checkpoint_tensors(V3)
    assert len(specs) == 91_991
    assert sum(spec.num_elements for spec in specs.values()) == 684_531_386_000
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"  # the last of its blocks has 64 rows
    assert specs[kv_a].shape == (5, 56)


def attention_flops(pairs: int, tokens: int) -> int:
    """Absorbed: queries into the latent space, scores and values there, values out of it."""
    return pairs * 2 * H * (2 * C + R) + tokens * 2 * H * C * (N + V)


def projection_flops(tokens: int) -> int:
    return tokens * 2 * (D * LQ + LQ * H * (N + R) + D * (C + R) + H * V * D)


def layers_flops(pairs: int, tokens: int) -> int:
    moe = tokens * 2 * (256 * D + 9 * EXPERT)
    return 61 * (projection_flops(tokens) + attention_flops(pairs, tokens)) + 3 * tokens * 2 * DENSE + 58 * moe


@pytest.mark.parametrize("num_tokens", [1, 4096])
def test_flops_of_a_prompt_and_of_a_token(num_tokens: int) -> None:
    explanation = explain_model(V3, num_tokens=num_tokens)
    pairs = num_tokens * (num_tokens + 1) // 2
    assert explanation.prompt_flops == layers_flops(pairs, num_tokens) + 2 * D * Z
    assert explanation.token_flops == layers_flops(num_tokens, 1) + 2 * D * Z
    mtp_token = (
        2 * 2 * D * D + projection_flops(1) + attention_flops(num_tokens, 1) + 2 * (256 * D + 9 * EXPERT) + 2 * D * Z
    )
    assert explanation.mtp_token_flops == mtp_token


def test_expanded_prompts_cost_less_at_length() -> None:
    num_tokens = 4096
    pairs = num_tokens * (num_tokens + 1) // 2
    absorbed = explain_model(V3, num_tokens=num_tokens)
    expanded = explain_model(V3, num_tokens=num_tokens, prefill_form="expanded")
    saved = 61 * pairs * 2 * H * ((2 * C + R) - (N + R + V))
    assert absorbed.prompt_flops - expanded.prompt_flops == saved
    assert absorbed.token_flops == expanded.token_flops


@pytest.mark.parametrize("name", [*CONFIGS, "demo"])
def test_parameters_are_those_of_the_engine(
    name: str, checkpoints: dict[str, Path], engines: dict[str, Engine]
) -> None:
    engine = engines[name]
    explanation = explain_model(engine.config, num_tokens=10, dtype=engine.dtype)
    assert explanation.parameters + explanation.mtp_parameters == engine.num_parameters
    assert explanation.weight_bytes == engine.weights_bytes
    assert explanation.cache_bytes_per_token == engine.layout.bytes_per_token
    specs = check_tensors(engine.config, stored_tensors(checkpoints[name])).values()
    assert engine.num_parameters == sum(spec.num_elements for spec in specs if spec.copy_of is None)


def test_stages_stand_in_the_order_of_the_computation() -> None:
    explanation = explain_model(V3, num_tokens=1)
    parts = list(dict.fromkeys(stage.part for stage in explanation.stages))
    assert parts == ["embedding", "layers 0-2", "layers 3-60", "head", "mtp"]
    moe = [stage.name for stage in explanation.stages if stage.part == "layers 3-60"]
    assert moe[0] == "input norm"
    assert moe[-3:] == ["router", "routed experts, 8 of 256", "shared expert"]
    assert _stage(explanation, "layers 3-60", "queries absorbed").output == "[T, 128, 576] bf16"
    assert _stage(explanation, "head", "head").output == "[T, 129280] fp32"


def _stage(explanation: Explanation, part: str, name: str) -> object:
    [stage] = [stage for stage in explanation.stages if (stage.part, stage.name) == (part, name)]
    return stage
