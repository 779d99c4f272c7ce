"""The demo model's shape, under the names of `config.json`: the true cache width, everything else small."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

BOS_ID, EOS_ID, PAD_ID, USER_ID, ASSISTANT_ID = range(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Names and meanings are those of `DeepseekV3Config`; positions are not scaled (no YaRN)."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    intermediate_size: int = 768
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 32
    moe_intermediate_size: int = 128
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    n_group: int = 4
    topk_group: int = 2
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 4096

    def config_json(self) -> dict[str, Any]:
        """The contents of `config.json`."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **asdict(self),
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "rope_scaling": None,
            "rope_interleave": True,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
