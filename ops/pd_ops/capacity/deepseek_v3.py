"""DeepSeek-V3 and checkpoints of its family: deepseek_v3.md §1 to §3, by the engine's own list of tensors."""

from __future__ import annotations

import math
from typing import Any

from pd_engine.model.config import ModelConfig
from pd_engine.model.tensors import TensorKind, TensorSpec, checkpoint_tensors
from pd_ops.capacity.architecture import COPIES, MTP, ROUTED, SHARED, Architecture, Fact, Published
from pd_ops.capacity.cache import Component, Rows
from pd_ops.capacity.weights import Ledger, Precision, Weight

BF16_BYTES = 2
SCALE_BLOCK = 128

# config.json of the released checkpoints.
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
PUBLISHED = Published(num_tensors=91_991, num_stored_elements=684_531_386_000, num_bytes_gib=641.3)

_PLAIN = {"bfloat16": Precision.BF16, "float32": Precision.FP32, None: Precision.BF16}


def deepseek_v3(name: str, config: ModelConfig, published: Published | None = None) -> Architecture:
    """The figures' source for one config."""
    row_bytes = BF16_BYTES * config.cache_width
    layers = config.num_hidden_layers
    cache = (_latents(row_bytes, layers, "main"),)
    mtp = (_latents(row_bytes, 1, "MTP"),) if config.has_mtp else ()
    return Architecture(
        name=name, hidden_size=config.hidden_size, vocab_size=config.vocab_size, num_layers=layers,
        max_context=config.max_position_embeddings, weights=Ledger(weights=tuple(_weights(config))), cache=cache,
        mtp_cache=mtp, handoff=cache, mtp_handoff=mtp,
        closed_form_cache=lambda num_tokens: 2 * layers * num_tokens * (config.kv_lora_rank + config.qk_rope_head_dim),
        divisors=_divisors(config),
        num_experts=config.n_routed_experts or 0, num_experts_per_token=config.num_experts_per_tok or 0,
        num_moe_layers=sum(config.is_moe(layer) for layer in range(layers)),
        expert_width=config.moe_intermediate_size or config.intermediate_size,
        residual_bytes=BF16_BYTES * config.hidden_size, query_width=config.num_attention_heads * config.cache_width,
        published=published, facts=_facts(config),
    )


def softmax_scale(config: ModelConfig) -> tuple[float, float]:
    """(what the scores are multiplied by, YaRN's part of it): deepseek_v3.md §3.1."""
    yarn = config.rope_scaling
    m = 1.0
    if yarn is not None and yarn.factor > 1 and yarn.mscale_all_dim:
        m = 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1
    return config.qk_head_dim**-0.5 * m * m, m * m


def _latents(row_bytes: int, num_layers: int, part: str) -> Component:
    return Component(name="latent and rope key", part=part, num_layers=num_layers, row_bytes=row_bytes,
                     rows=Rows.ENTRIES, size=1)


def _weights(config: ModelConfig) -> list[Weight]:
    """Equal tensors of one part together."""
    plain = _PLAIN[config.dtype]
    counts: dict[Weight, int] = {}
    for spec in checkpoint_tensors(config).values():
        if spec.kind is not TensorKind.SCALE:
            weight = _weight(config, spec, plain)
            counts[weight] = counts.get(weight, 0) + 1
    return [
        Weight(name=one.name, part=one.part, shape=one.shape, precision=one.precision, count=count, split=one.split)
        for one, count in counts.items()
    ]


def _weight(config: ModelConfig, spec: TensorSpec, plain: Precision) -> Weight:
    is_matrix = spec.kind in (TensorKind.LINEAR, TensorKind.ABSORBED)
    precision = Precision.FP8_FP32 if is_matrix and config.weight_format == "fp8" else plain
    if spec.kind is TensorKind.ROUTER_BIAS:
        precision = Precision.FP32
    return Weight(
        name=spec.name.rsplit(".", 2)[-2] if "." in spec.name else spec.name, part=_part(config, spec),
        shape=spec.shape, precision=precision, split=_is_split(spec),
    )


def _part(config: ModelConfig, spec: TensorSpec) -> str:
    if spec.kind is TensorKind.COPY:
        return COPIES
    if spec.layer == config.num_hidden_layers:
        return MTP
    for piece, part in ((".experts.", ROUTED), (".shared_experts.", SHARED), (".self_attn.", "attention"),
                        (".gate.", "router")):
        if piece in spec.name:
            return part
    if spec.kind in (TensorKind.EMBEDDING, TensorKind.HEAD):
        return "embedding and head"
    return "norms" if spec.kind is TensorKind.NORM else "dense MLP"


def _is_split(spec: TensorSpec) -> bool:
    """Heads, the width of MLPs, experts and the vocabulary are divided; low-rank inputs, router and norms are not."""
    if spec.kind in (TensorKind.EMBEDDING, TensorKind.HEAD, TensorKind.COPY, TensorKind.ABSORBED):
        return True
    return spec.kind is TensorKind.LINEAR and not any(name in spec.name for name in ("q_a_proj", "kv_a_proj"))


def _divisors(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """FP8 matrices are divided in whole blocks of 128, so that no scale belongs to two ranks."""
    block = SCALE_BLOCK if config.weight_format == "fp8" else 1
    found = [("attention heads", config.num_attention_heads), ("vocabulary", config.vocab_size)]
    if config.first_k_dense_replace or config.n_routed_experts is None:
        found.append(("blocks of the dense MLP" if block > 1 else "width of the dense MLP",
                      config.intermediate_size // block))
    if config.n_routed_experts is not None:
        found.append(("routed experts", config.n_routed_experts))
    if config.n_shared_experts and config.moe_intermediate_size:
        width = config.moe_intermediate_size * config.n_shared_experts
        found.append(("blocks of the shared expert" if block > 1 else "width of the shared expert", width // block))
    return tuple((what, max(1, number)) for what, number in found)


def _facts(config: ModelConfig) -> tuple[Fact, ...]:
    scale, yarn = softmax_scale(config)
    latent = BF16_BYTES * config.cache_width
    heads = BF16_BYTES * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    found = [
        Fact(name="attention scale", value=scale, shown=f"{scale:.8f}", source=f"1/sqrt({config.qk_head_dim}) x YaRN"),
        Fact(name="YaRN mscale squared", value=yarn, shown=f"{yarn:.6f}", source="(0.1 mscale_all_dim ln factor + 1)²"),
        Fact(name="latent cache, token and layer", value=latent, shown=f"{latent:,} B",
             source=f"{config.kv_lora_rank} + {config.qk_rope_head_dim} numbers in bf16"),
        Fact(name="keys and values of all heads instead", value=heads, shown=f"{heads:,} B",
             source=f"{config.num_attention_heads} x ({config.qk_head_dim} + {config.v_head_dim}) numbers in bf16"),
        Fact(name="latent cache as a share of that", value=latent / heads, shown=f"{100 * latent / heads:.3f} %",
             source="the ratio of the two lines above"),
    ]
    if config.n_routed_experts is not None:
        found.append(Fact(
            name="experts", value=config.n_routed_experts,
            shown=f"{config.n_routed_experts} + {config.n_shared_experts} experts, top-{config.num_experts_per_token}",
            source="routed and shared",
        ))
        found.append(Fact(
            name="routing weights are multiplied by", value=config.routed_scaling_factor,
            shown=f"{config.routed_scaling_factor}", source="after they were normalised to sum 1",
        ))
    return tuple(found)
