"""The tensors of a checkpoint with a given config: names, shapes and what each is (deepseek_v3.md §2). Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pd_engine.model.config import ModelConfig


class TensorKind(Enum):
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    LINEAR = "linear"            # FP8 in quantised checkpoints
    ABSORBED = "absorbed"        # kv_b_proj, likewise; decoded at load, since its halves are split a head
    SCALE = "scale"              # of an FP8 matrix, one a block of 128 × 128
    PLAIN_LINEAR = "plain"       # never quantised: router, eh_proj
    ROUTER_BIAS = "router_bias"  # always fp32
    COPY = "copy"                # the MTP layer's copy of embedding or head


QUANTIZED_KINDS = frozenset({TensorKind.LINEAR, TensorKind.ABSORBED})
SCALE_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor. `layer` is None outside the layers; MTP's layer has number `num_hidden_layers`."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    layer: int | None = None
    optional: bool = False
    copy_of: str | None = None

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def scale_name(weight: str) -> str:
    """The tensor with the scales of an FP8 matrix; the matrix is multiplied by them, notwithstanding the name."""
    return weight + SCALE_SUFFIX


def checkpoint_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors by name, the MTP layer's included if there is one, and the scales of FP8 matrices.

    Optional are the correction biases (a router without them selects by the bare scores) and MTP's copies.
    """
    specs = {}
    for spec in _all(config):
        specs[spec.name] = spec
        if config.weight_format == "fp8" and spec.kind in QUANTIZED_KINDS:
            specs[scale_name(spec.name)] = _scale(spec)
    return specs


def _scale(spec: TensorSpec) -> TensorSpec:
    rows, columns = (-(-size // SCALE_BLOCK) for size in spec.shape)
    return TensorSpec(
        name=scale_name(spec.name), shape=(rows, columns), kind=TensorKind.SCALE, layer=spec.layer
    )


def _all(config: ModelConfig) -> Iterator[TensorSpec]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield TensorSpec(name=EMBEDDING, shape=(vocab, hidden), kind=TensorKind.EMBEDDING)
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
    yield TensorSpec(name=FINAL_NORM, shape=(hidden,), kind=TensorKind.NORM)
    yield TensorSpec(name=HEAD, shape=(vocab, hidden), kind=TensorKind.HEAD)
    if config.has_mtp:
        yield from _mtp(config)


def _layer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    prefix = layer_prefix(layer)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield TensorSpec(
            name=f"{prefix}{norm}.weight", shape=(config.hidden_size,), kind=TensorKind.NORM, layer=layer
        )
    yield from _attention(config, layer, f"{prefix}self_attn.")
    if config.is_moe(layer):
        yield from _experts(config, layer, f"{prefix}mlp.")
    else:
        yield from _mlp(config.hidden_size, config.intermediate_size, layer, f"{prefix}mlp.")


def _attention(config: ModelConfig, layer: int, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    latent = config.kv_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (config.cache_width, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
        "o_proj": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        shapes["q_proj"] = (heads * config.qk_head_dim, hidden)
    else:
        shapes["q_a_proj"] = (config.q_lora_rank, hidden)
        shapes["q_a_layernorm"] = (config.q_lora_rank,)
        shapes["q_b_proj"] = (heads * config.qk_head_dim, config.q_lora_rank)
    for name, shape in shapes.items():
        kind = TensorKind.NORM if "norm" in name else TensorKind.LINEAR
        kind = TensorKind.ABSORBED if name == "kv_b_proj" else kind
        yield TensorSpec(name=f"{prefix}{name}.weight", shape=shape, kind=kind, layer=layer)


def _mlp(hidden: int, width: int, layer: int, prefix: str) -> Iterator[TensorSpec]:
    for name, shape in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
        yield TensorSpec(name=f"{prefix}{name}.weight", shape=shape, kind=TensorKind.LINEAR, layer=layer)


def _experts(config: ModelConfig, layer: int, prefix: str) -> Iterator[TensorSpec]:
    num_experts, width = config.n_routed_experts, config.moe_intermediate_size
    assert num_experts is not None and width is not None
    yield TensorSpec(
        name=f"{prefix}gate.weight", shape=(num_experts, config.hidden_size), kind=TensorKind.PLAIN_LINEAR, layer=layer
    )
    yield TensorSpec(
        name=f"{prefix}gate.e_score_correction_bias", shape=(num_experts,), kind=TensorKind.ROUTER_BIAS, layer=layer,
        optional=True,
    )
    for expert in range(num_experts):
        yield from _mlp(config.hidden_size, width, layer, f"{prefix}experts.{expert}.")
    if config.n_shared_experts:
        yield from _mlp(config.hidden_size, width * config.n_shared_experts, layer, f"{prefix}shared_experts.")


def _mtp(config: ModelConfig) -> Iterator[TensorSpec]:
    layer, hidden = config.num_hidden_layers, config.hidden_size
    prefix = layer_prefix(layer)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield TensorSpec(name=f"{prefix}{norm}.weight", shape=(hidden,), kind=TensorKind.NORM, layer=layer)
    yield TensorSpec(
        name=f"{prefix}eh_proj.weight", shape=(hidden, 2 * hidden), kind=TensorKind.PLAIN_LINEAR, layer=layer
    )
    yield from _layer(config, layer)
    for name, original in (("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", HEAD)):
        yield TensorSpec(
            name=f"{prefix}{name}", shape=(config.vocab_size, hidden), kind=TensorKind.COPY, layer=layer,
            optional=True, copy_of=original,
        )
