"""The weights of one checkpoint, checked, fused and packed for one `Ops`. Nothing else keeps a copy of them.

Shape suffixes as in pd_kernels.ops. Norm weights and router biases are float32, whatever the checkpoint holds;
everything else takes the engine's dtype.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd_engine.cache.arena import TORCH_DTYPES
from pd_engine.cache.layout import DTYPE_BYTES
from pd_engine.errors import FailedPrecondition
from pd_engine.model.checkpoint import StoredTensor
from pd_engine.model.config import ModelConfig
from pd_engine.model.tensors import EMBEDDING, FINAL_NORM, HEAD, TensorKind, checkpoint_tensors, layer_prefix
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


class WeightReader:
    """Reads single tensors of a checked checkpoint into memory of their own. A context manager."""

    def __init__(self, stored: dict[str, StoredTensor]) -> None:
        self._stored = stored
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def read_into(self, target: Tensor, name: str) -> None:
        """Copies a tensor into `target`, rounding to its dtype.

        Raises:
            FailedPrecondition: the file has changed or is broken, or a number is not finite in the target's dtype.
        """
        target.copy_(self._mapped(name))
        _check_finite(target, name)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        mapped = self._mapped(name)
        target = torch.empty(mapped.shape, dtype=dtype)
        target.copy_(mapped)
        _check_finite(target, name)
        return target

    def equal(self, name: str, other: str) -> bool:
        """Raises:
        FailedPrecondition: they differ, and one of them holds NaN or infinity.
        """
        if torch.equal(self._mapped(name), self._mapped(other)):
            return True
        for each in (other, name):
            _check_finite(self._mapped(each), each)
        return False

    def _mapped(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file: for copying from, never kept."""
        file = self._stored[name].file
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            tensor: Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise FailedPrecondition(f"{file} cannot be read: {error}") from None
        return tensor


def _check_finite(tensor: Tensor, name: str) -> None:
    """A sum is finite only if all numbers are, and costs a tenth of looking at each of them.

    Raises:
        FailedPrecondition: the tensor holds NaN or infinity.
    """
    if torch.isfinite(tensor.sum(dtype=torch.float32)):
        return
    wrong = torch.nonzero(~torch.isfinite(tensor))
    if len(wrong):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise FailedPrecondition(
            f"{name} holds NaN or infinity, read as {dtype}: {len(wrong)} of {tensor.numel()} numbers, the first at "
            f"{wrong[0].tolist()}; all weights must be finite"
        )


def load_weights(
    config: ModelConfig, stored: dict[str, StoredTensor], ops: Ops, *, dtype: str, with_mtp: bool
) -> ModelWeights:
    """Reads and packs all weights of a checked checkpoint, layer by layer, so that no more than one layer is in memory
    twice.

    Args:
        stored: passed `check_tensors`.
        dtype: "bf16" or "fp32", the engine's.
        with_mtp: whether the MTP layer is loaded.

    Raises:
        FailedPrecondition: a file cannot be read any more, a tensor holds NaN or infinity, or MTP's copies differ from
            the main model's tensors.
    """
    num_parameters, num_bytes = weights_size(config, stored, dtype=dtype, with_mtp=with_mtp)
    with WeightReader(stored) as reader:
        loader = _Loader(config, ops, reader, TORCH_DTYPES[dtype])
        mtp = loader.mtp() if with_mtp else None
        return ModelWeights(
            embedding_ZD=reader.read(EMBEDDING, TORCH_DTYPES[dtype]),
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
    """(parameters, bytes in the engine's dtype) of what is loaded, MTP's copies not counted."""
    num_parameters = num_bytes = 0
    for name, spec in checkpoint_tensors(config).items():
        left_out = spec.kind is TensorKind.COPY or (spec.layer == config.num_hidden_layers and not with_mtp)
        if left_out or name not in stored:
            continue
        fp32 = spec.kind in (TensorKind.NORM, TensorKind.ROUTER_BIAS)
        num_parameters += spec.num_elements
        num_bytes += spec.num_elements * DTYPE_BYTES["fp32" if fp32 else dtype]
    return num_parameters, num_bytes


class _Loader:
    """Builds the packed weights of one layer after the other."""

    def __init__(self, config: ModelConfig, ops: Ops, reader: WeightReader, dtype: torch.dtype) -> None:
        self._config = config
        self._ops = ops
        self._reader = reader
        self._dtype = dtype

    def norm(self, name: str) -> Tensor:
        return self._reader.read(name, torch.float32)

    def linear(self, name: str) -> Packed:
        return self._ops.pack_linear(self._reader.read(name, self._dtype))

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
        kv_b = self._reader.read(f"{prefix}kv_b_proj.weight", self._dtype)
        kv_b_HFC = kv_b.view(config.num_attention_heads, -1, config.kv_lora_rank)
        return AttentionWeights(
            qkv_a=self._ops.pack_linear(
                self._stacked([f"{prefix}{queries}.weight", f"{prefix}kv_a_proj_with_mqa.weight"])
            ),
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
        num_experts, width = config.n_routed_experts, config.moe_intermediate_size
        assert num_experts is not None and width is not None
        gate_up_X2ID = torch.empty(num_experts, 2 * width, config.hidden_size, dtype=self._dtype)
        down_XDI = torch.empty(num_experts, config.hidden_size, width, dtype=self._dtype)
        for expert in range(num_experts):
            self._reader.read_into(gate_up_X2ID[expert, :width], f"{prefix}experts.{expert}.gate_proj.weight")
            self._reader.read_into(gate_up_X2ID[expert, width:], f"{prefix}experts.{expert}.up_proj.weight")
            self._reader.read_into(down_XDI[expert], f"{prefix}experts.{expert}.down_proj.weight")
        shared_gate_up, shared_down = (
            self._gate_up_down(f"{prefix}shared_experts.") if config.n_shared_experts else (None, None)
        )
        bias = f"{prefix}gate.e_score_correction_bias"
        return MoeWeights(
            gate=self.linear(f"{prefix}gate.weight"),
            bias_X=self._reader.read(bias, torch.float32) if bias in self._reader else torch.zeros(num_experts),
            experts=self._ops.pack_experts(gate_up_X2ID, down_XDI, shared_gate_up, shared_down),
        )

    def _gate_up_down(self, prefix: str) -> tuple[Tensor, Tensor]:
        gate_up = self._stacked([f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"])
        return gate_up, self._reader.read(f"{prefix}down_proj.weight", self._dtype)

    def _stacked(self, names: list[str]) -> Tensor:
        """Matrices on top of each other, read straight into the result."""
        shapes = [self._reader.shape(name) for name in names]
        result = torch.empty(sum(rows for rows, _ in shapes), shapes[0][1], dtype=self._dtype)
        start = 0
        for name, (rows, _) in zip(names, shapes, strict=True):
            self._reader.read_into(result[start : start + rows], name)
            start += rows
        return result
