"""The weights of one checkpoint, checked, fused and packed for one `Ops`. Nothing else keeps a copy of them.

Shape suffixes as in pd_kernels.ops. Norm weights and router biases are float32, whatever the checkpoint holds. FP8
matrices stay FP8, but for kv_b_proj: its halves are split a head, across blocks of scales. Everything else takes the
engine's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd_engine.cache.arena import TORCH_DTYPES
from pd_engine.cache.layout import DTYPE_BYTES
from pd_engine.errors import FailedPrecondition
from pd_engine.model.checkpoint import StoredTensor
from pd_engine.model.config import ModelConfig
from pd_engine.model.tensors import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    TensorKind,
    TensorSpec,
    checkpoint_tensors,
    layer_prefix,
)
from pd_engine.model.weight_reader import WeightReader
from pd_kernels.fp8_matrix import Weight, decoded
from pd_kernels.ops import Ops, Packed


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """`qkv_a` is [q_a; kv_a] stacked, or [q; kv_a] where the queries have no low rank (then `q_b` is None)."""

    qkv_a: Packed
    q_a_norm: Tensor | None
    q_b: Packed | None
    kv_a_norm: Tensor
    kv_b: Packed
    o: Packed


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeights:
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeWeights:
    gate: Packed
    bias_X: Tensor
    experts: Packed


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    input_norm: Tensor
    attention: AttentionWeights
    post_norm: Tensor
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpWeights:
    """Embedding and head are the main model's."""

    enorm: Tensor
    hnorm: Tensor
    eh_proj: Packed
    layer: LayerWeights
    head_norm: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    embedding_ZD: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Packed
    mtp: MtpWeights | None
    num_parameters: int
    num_bytes: int


def load_weights(
    config: ModelConfig, stored: dict[str, StoredTensor], ops: Ops, *, dtype: str, with_mtp: bool
) -> ModelWeights:
    """Reads and packs all weights of a checked checkpoint, layer by layer, so that no more than one layer is in memory
    twice.

    Args:
        stored: passed `check_tensors`.
        dtype: "bf16", "fp16" or "fp32", the engine's.
        with_mtp: whether the MTP layer is loaded.

    Raises:
        FailedPrecondition: a file cannot be read any more, a tensor holds NaN, infinity or what the dtype does not
            reach, or MTP's copies differ from the main model's tensors.
    """
    num_parameters, num_bytes = weights_size(config, stored, dtype=dtype, with_mtp=with_mtp)
    with WeightReader(stored) as reader:
        loader = _Loader(config, ops, reader, TORCH_DTYPES[dtype])
        mtp = loader.mtp() if with_mtp else None
        return ModelWeights(
            embedding_ZD=reader.read(EMBEDDING, TORCH_DTYPES[dtype]).to(ops.device),
            layers=tuple(loader.layer(layer) for layer in range(config.num_hidden_layers)),
            final_norm=loader.norm(FINAL_NORM),
            head=loader.linear(HEAD),
            mtp=mtp,
            num_parameters=num_parameters,
            num_bytes=num_bytes,
        )


def weights_size(
    config: ModelConfig, stored: dict[str, StoredTensor], *, dtype: str, with_mtp: bool
) -> tuple[int, int]:
    """(parameters, bytes as they are kept) of what is loaded; MTP's copies are not counted, nor the scales of FP8
    matrices, a thirtieth of their bytes."""
    num_parameters = num_bytes = 0
    for name, spec in checkpoint_tensors(config).items():
        left_out = spec.kind in (TensorKind.COPY, TensorKind.SCALE) or (
            spec.layer == config.num_hidden_layers and not with_mtp
        )
        if left_out or name not in stored:
            continue
        num_parameters += spec.num_elements
        num_bytes += spec.num_elements * DTYPE_BYTES[_kept_dtype(config, spec, dtype)]
    return num_parameters, num_bytes


def _kept_dtype(config: ModelConfig, spec: TensorSpec, dtype: str) -> str:
    if spec.kind in (TensorKind.NORM, TensorKind.ROUTER_BIAS):
        return "fp32"
    return "fp8" if config.weight_format == "fp8" and spec.kind is TensorKind.LINEAR else dtype


class _Loader:
    """Builds the packed weights of one layer after the other."""

    def __init__(self, config: ModelConfig, ops: Ops, reader: WeightReader, dtype: torch.dtype) -> None:
        self._config = config
        self._ops = ops
        self._reader = reader
        self._dtype = dtype

    def norm(self, name: str) -> Tensor:
        """A norm's weight, or a router's bias: float32, where the ops compute."""
        return self._reader.read(name, torch.float32).to(self._ops.device)

    def linear(self, *names: str) -> Packed:
        """One projection, or several on top of each other."""
        return self._ops.pack_linear(self._reader.matrix(list(names), self._dtype))

    def layer(self, number: int) -> LayerWeights:
        prefix = layer_prefix(number)
        return LayerWeights(
            input_norm=self.norm(f"{prefix}input_layernorm.weight"),
            attention=self._attention(f"{prefix}self_attn."),
            post_norm=self.norm(f"{prefix}post_attention_layernorm.weight"),
            mlp=self._moe(f"{prefix}mlp.") if self._config.is_moe(number) else self._dense(f"{prefix}mlp."),
        )

    def mtp(self) -> MtpWeights:
        """The engine runs MTP with the main model's embedding and head, so copies that differ are refused."""
        number = self._config.num_hidden_layers
        prefix = layer_prefix(number)
        for name, original in (("embed_tokens.weight", EMBEDDING), ("shared_head.head.weight", HEAD)):
            if f"{prefix}{name}" in self._reader and not self._reader.equal(f"{prefix}{name}", original):
                raise FailedPrecondition(f"{prefix}{name} must equal {original}: MTP shares it with the main model")
        return MtpWeights(
            enorm=self.norm(f"{prefix}enorm.weight"),
            hnorm=self.norm(f"{prefix}hnorm.weight"),
            eh_proj=self.linear(f"{prefix}eh_proj.weight"),
            layer=self.layer(number),
            head_norm=self.norm(f"{prefix}shared_head.norm.weight"),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config = self._config
        low_rank = config.q_lora_rank is not None
        queries = "q_a_proj" if low_rank else "q_proj"
        kv_b = decoded(self._reader.matrix([f"{prefix}kv_b_proj.weight"], self._dtype))
        kv_b_HFC = kv_b.to(self._dtype).view(config.num_attention_heads, -1, config.kv_lora_rank)
        return AttentionWeights(
            qkv_a=self.linear(f"{prefix}{queries}.weight", f"{prefix}kv_a_proj_with_mqa.weight"),
            q_a_norm=self.norm(f"{prefix}q_a_layernorm.weight") if low_rank else None,
            q_b=self.linear(f"{prefix}q_b_proj.weight") if low_rank else None,
            kv_a_norm=self.norm(f"{prefix}kv_a_layernorm.weight"),
            kv_b=self._ops.pack_absorbed(
                kv_b_HFC[:, : config.qk_nope_head_dim].contiguous(), kv_b_HFC[:, config.qk_nope_head_dim :].contiguous()
            ),
            o=self.linear(f"{prefix}o_proj.weight"),
        )

    def _dense(self, prefix: str) -> DenseWeights:
        gate_up, down = self._gate_up_down(prefix)
        return DenseWeights(gate_up=self._ops.pack_linear(gate_up), down=self._ops.pack_linear(down))

    def _moe(self, prefix: str) -> MoeWeights:
        config = self._config
        num_experts = config.n_routed_experts
        assert num_experts is not None
        experts = [f"{prefix}experts.{expert}." for expert in range(num_experts)]
        gate_up_X2ID = self._reader.matrices(
            [[f"{expert}gate_proj.weight", f"{expert}up_proj.weight"] for expert in experts], self._dtype
        )
        down_XDI = self._reader.matrices([[f"{expert}down_proj.weight"] for expert in experts], self._dtype)
        shared_gate_up, shared_down = (
            self._gate_up_down(f"{prefix}shared_experts.") if config.n_shared_experts else (None, None)
        )
        bias = f"{prefix}gate.e_score_correction_bias"
        return MoeWeights(
            gate=self.linear(f"{prefix}gate.weight"),
            bias_X=self.norm(bias) if bias in self._reader else torch.zeros(num_experts, device=self._ops.device),
            experts=self._ops.pack_experts(gate_up_X2ID, down_XDI, shared_gate_up, shared_down),
        )

    def _gate_up_down(self, prefix: str) -> tuple[Weight, Weight]:
        gate_up = self._reader.matrix([f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"], self._dtype)
        return gate_up, self._reader.matrix([f"{prefix}down_proj.weight"], self._dtype)
