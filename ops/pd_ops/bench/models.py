"""Models that benchmarks make for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY_NAME = "tiny"
DEEP_NAME = "deep"

# 18 million random weights over the true cache width: small enough that overhead shows, not so small that it is all.
TINY_V3: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 6, "num_attention_heads": 8, "n_shared_experts": 1, "n_routed_experts": 16,
    "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 8192,
}

# What speculation is for: many layers between two tokens, and drafts that are nearly always right, as layers add little
# to the residual stream. Its layers are dense: two rows of a step go to different experts, and cost more by that.
DEEP_V3: dict[str, Any] = TINY_V3 | {"num_hidden_layers": 24, "first_k_dense_replace": 24}
DEEP_LAYER_SCALE = 0.006

MADE_NAMES = (TINY_NAME, DEEP_NAME)
_RECIPES: dict[str, dict[str, Any]] = {
    TINY_NAME: {"overrides": TINY_V3}, DEEP_NAME: {"overrides": DEEP_V3, "layer_scale": DEEP_LAYER_SCALE},
}


def write_model(name: str, path: Path) -> Path:
    """One of `MADE_NAMES` in folder `path`, in bf16, unless it is there already."""
    if not path.exists():
        from pd_engine.model.random_checkpoint import write_random_checkpoint

        write_random_checkpoint(path, seed=0, **_RECIPES[name])
    return path
