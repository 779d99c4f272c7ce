"""Writes random checkpoints of any size in Hugging Face's format: for tests and benchmarks. Torch, but no model code.

The weights are scaled so that activations keep their size through the layers, logits spread by a few units, and the
router has no ties worth the name; the tokenizer knows single bytes and DeepSeek's special tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from pd_engine.errors import AlreadyExists, InvalidArgument
from pd_engine.model.checkpoint import INDEX_FILE, WEIGHTS_FILE
from pd_engine.model.config import ARCHITECTURE, CONFIG_FILE, ModelConfig
from pd_engine.model.tensors import (
    EMBEDDING,
    FINAL_NORM,
    QUANTIZED_KINDS,
    SCALE_SUFFIX,
    TensorKind,
    TensorSpec,
    checkpoint_tensors,
)
from pd_kernels.fp8_quant.reference import quantize_weight

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>",
)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{{ bos_token }}{%- for m in messages -%}"
    "{%- if m['role'] == 'assistant' -%}{{ '<｜Assistant｜>' + m['content'] + eos_token }}"
    "{%- elif m['role'] == 'user' -%}{{ '<｜User｜>' + m['content'] }}"
    "{%- else -%}{{ m['content'] }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}"
)

# The shape of the demo checkpoint, narrower: every field may be overridden.
TINY_CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_interleave": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
FIELD_NAMES = frozenset(TINY_CONFIG) | {"num_key_value_heads", "quantization_config"}
FP8_QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
    seed: int
    layer_scale: float


def write_random_checkpoint(
    path: Path, overrides: dict[str, Any] | None = None, *, seed: int = 0, max_shard_bytes: int | None = None,
    layer_scale: float = 1.0, with_router_biases: bool = True, with_mtp_copies: bool = True, fp8: bool = False,
) -> ModelConfig:
    """Writes config, weights and tokenizer to folder `path`, which must be new or empty.

    Args:
        overrides: fields of config.json over `TINY_CONFIG`; `torch_dtype` is also the dtype of the weights.
        seed: equal seeds give equal weights.
        max_shard_bytes: cuts the weights into shards of at most about so many bytes; none: one file.
        layer_scale: scales what layers add to the residual stream. With a small one the next token depends mostly on
            the last, for the main model and MTP alike, so that most drafts are accepted (about 8 of 10 at 0.1).
        with_router_biases, with_mtp_copies: leave out what some checkpoints do not have.
        fp8: projections and experts in FP8, as DeepSeek-V3 is published.

    Raises:
        AlreadyExists: there is something in the folder.
        InvalidArgument: the fields make no config that this engine takes.
    """
    data = TINY_CONFIG | {"num_key_value_heads": None} | (overrides or {})
    data["num_key_value_heads"] = data["num_key_value_heads"] or data["num_attention_heads"]
    if fp8:
        data["quantization_config"] = FP8_QUANTIZATION
    config = ModelConfig.parse(data)
    if config.vocab_size < MIN_VOCAB_SIZE:
        raise InvalidArgument(
            f"vocab_size must be >= {MIN_VOCAB_SIZE} (bytes and special tokens), got {config.vocab_size}"
        )
    if path.exists() and any(path.iterdir()):
        raise AlreadyExists(f"{path} is not empty")
    path.mkdir(parents=True, exist_ok=True)
    left_out = {
        kind
        for kind, wanted in ((TensorKind.ROUTER_BIAS, with_router_biases), (TensorKind.COPY, with_mtp_copies))
        if not wanted
    }
    specs = [spec for spec in checkpoint_tensors(config).values() if spec.kind not in left_out]
    _write_weights(path, specs, config, _Recipe(seed=seed, layer_scale=layer_scale), max_shard_bytes)
    _write_json(path / CONFIG_FILE, data)
    _write_json(path / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _write_tokenizer(path, config)
    return config


def _write_weights(
    path: Path, specs: list[TensorSpec], config: ModelConfig, recipe: _Recipe, max_shard_bytes: int | None
) -> None:
    shards = list(_shards(specs, config, max_shard_bytes))
    if max_shard_bytes is None:
        file_names = [WEIGHTS_FILE]
    else:
        file_names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {spec.name: name for name, shard in zip(file_names, shards, strict=True) for spec in shard}
        _write_json(path / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    for name, shard in zip(file_names, shards, strict=True):
        tensors = {spec.name: _tensor(spec, config, recipe) for spec in shard}
        save_file(tensors, path / name, metadata={"format": "pt"})


def _shards(specs: list[TensorSpec], config: ModelConfig, max_bytes: int | None) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    num_bytes = 0
    for spec in specs:
        spec_bytes = spec.num_elements * _dtype(spec, config).itemsize
        if shard and max_bytes is not None and num_bytes + spec_bytes > max_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(spec)
        num_bytes += spec_bytes
    yield shard


def _tensor(spec: TensorSpec, config: ModelConfig, recipe: _Recipe) -> Tensor:
    """A tensor as it is stored."""
    if spec.kind is TensorKind.SCALE:
        weight = checkpoint_tensors(config)[spec.name.removesuffix(SCALE_SUFFIX)]
        return quantize_weight(_values(weight, recipe))[1]
    values = _values(spec, recipe)
    if config.weight_format == "fp8" and spec.kind in QUANTIZED_KINDS:
        return quantize_weight(values)[0]
    return values.to(_dtype(spec, config))


def _values(spec: TensorSpec, recipe: _Recipe) -> Tensor:
    """Random, from the seed and the tensor's name alone (a copy's: that of its original)."""
    name = spec.copy_of or spec.name
    values = _noise(name, spec.shape, recipe.seed)
    if spec.kind is TensorKind.NORM:
        values = 1 + 0.1 * _norm_noise(name, values, recipe)
    elif spec.kind is TensorKind.ROUTER_BIAS:
        values = 0.05 * values
    elif name != EMBEDDING:
        values = values * spec.shape[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        values = values * recipe.layer_scale
    if name.endswith("eh_proj.weight"):
        values = values * recipe.layer_scale
        values[:, : spec.shape[0]] += torch.eye(spec.shape[0])
    return values


def _norm_noise(name: str, noise: Tensor, recipe: _Recipe) -> Tensor:
    """Where layers add little, the two norms between an embedding and MTP's logits come near to the one that is between
    an embedding and the main model's, so that both like the same tokens."""
    own = min(1.0, recipe.layer_scale)
    if name.endswith("enorm.weight"):
        return own * noise
    if name.endswith("shared_head.norm.weight"):
        return own * noise + (1 - own) * _noise(FINAL_NORM, list(noise.shape), recipe.seed)
    return noise


def _noise(name: str, shape: Sequence[int], seed: int) -> Tensor:
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(seed + int.from_bytes(digest, "little"))
    return torch.randn(list(shape), generator=generator)


def _dtype(spec: TensorSpec, config: ModelConfig) -> torch.dtype:
    fp32 = spec.kind is TensorKind.ROUTER_BIAS or config.dtype == "float32"
    return torch.float32 if fp32 else torch.bfloat16


def _write_tokenizer(path: Path, config: ModelConfig) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "pad_token": SPECIAL_TOKENS[2],
            "add_bos_token": False,
            "model_max_length": config.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
