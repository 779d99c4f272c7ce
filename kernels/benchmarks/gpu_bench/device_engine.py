"""The engine on one device with random weights, which are made there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_bench.shapes import Maker
from pd_engine.engine import Engine
from pd_engine.model.config import ModelConfig, cache_layout
from pd_engine.model.weights import (
    AttentionWeights,
    DenseWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)
from pd_kernels.triton_ops import TritonOps

LAYER_SCALE = 0.15  # of what layers add: the next token then depends mostly on the last, and many drafts are accepted

V3_WIDTH: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 8192, "hidden_size": 7168, "num_hidden_layers": 3,
    "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "max_position_embeddings": 163840,
    "first_k_dense_replace": 1, "n_routed_experts": 16, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}
TINY: dict[str, Any] = V3_WIDTH | {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "intermediate_size": 64,
    "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}


def build_engine(config: ModelConfig, weights: ModelWeights, ops: TritonOps, *, num_blocks: int) -> Engine:
    """An `Engine` over these weights with an arena of its own on the device of the ops."""
    return Engine(
        config=config, weights=weights, ops=ops, layout=cache_layout(config, "bf16", 16, with_mtp=True),
        num_blocks=num_blocks, max_context_length=num_blocks * 16, dtype="bf16", prefill_form="absorbed",
        fingerprint="random weights", load_seconds=0.0,
    )


def random_weights(config: ModelConfig, make: Maker, ops: TritonOps) -> ModelWeights:
    """Made on the device, never on disk."""
    layers = tuple(_layer(config, make, ops, number) for number in range(config.num_hidden_layers))
    d = config.hidden_size
    mtp = MtpWeights(
        enorm=_norm(make, d), hnorm=_norm(make, d), eh_proj=ops.pack_linear(make.weight(d, 2 * d)),
        layer=_layer(config, make, ops, config.num_hidden_layers), head_norm=_norm(make, d),
    )
    return ModelWeights(
        embedding_ZD=make.normal(config.vocab_size, d), layers=layers, final_norm=_norm(make, d),
        head=ops.pack_linear(make.weight(config.vocab_size, d)), mtp=mtp, num_parameters=0, num_bytes=0,
    )


def _norm(make: Maker, width: int) -> Tensor:
    return 1 + make.normal(width, dtype=torch.float32, scale=0.1)


def _layer(config: ModelConfig, make: Maker, ops: TritonOps, number: int) -> LayerWeights:
    d, heads = config.hidden_size, config.num_attention_heads
    assert config.q_lora_rank is not None
    attention = AttentionWeights(
        qkv_a=ops.pack_linear(make.weight(config.q_lora_rank + config.cache_width, d)),
        q_a_norm=_norm(make, config.q_lora_rank),
        q_b=ops.pack_linear(make.weight(heads * config.qk_head_dim, config.q_lora_rank)),
        kv_a_norm=_norm(make, config.kv_lora_rank),
        kv_b=ops.pack_absorbed(make.weight(heads, config.qk_nope_head_dim, config.kv_lora_rank),
                               make.weight(heads, config.v_head_dim, config.kv_lora_rank)),
        o=ops.pack_linear(make.weight(d, heads * config.v_head_dim) * LAYER_SCALE),
    )
    return LayerWeights(
        input_norm=_norm(make, d), attention=attention, post_norm=_norm(make, d),
        mlp=_moe(config, make, ops) if config.is_moe(number) else DenseWeights(
            gate_up=ops.pack_linear(make.weight(2 * config.intermediate_size, d)),
            down=ops.pack_linear(make.weight(d, config.intermediate_size) * LAYER_SCALE),
        ),
    )


def _moe(config: ModelConfig, make: Maker, ops: TritonOps) -> MoeWeights:
    d, width, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    assert width is not None and count is not None
    return MoeWeights(
        gate=ops.pack_linear(make.weight(count, d)), bias_X=make.normal(count, dtype=torch.float32, scale=0.1),
        experts=ops.pack_experts(
            make.weight(count, 2 * width, d), make.weight(count, d, width) * LAYER_SCALE,
            make.weight(2 * width, d), make.weight(d, width) * LAYER_SCALE),
    )
