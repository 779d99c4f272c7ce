"""`Ops` in torch and numpy: the definition that every other implementation is measured against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_kernels import contract, index_ranges
from pd_kernels.absorb import reference as absorb
from pd_kernels.block_checksum import reference as block_checksum
from pd_kernels.embed import reference as embed
from pd_kernels.fp8_matrix import Weight, decoded
from pd_kernels.latent_write import reference as latent_write
from pd_kernels.linear import reference as linear
from pd_kernels.mla_attention import reference as mla_attention
from pd_kernels.moe_experts import reference as moe_experts
from pd_kernels.moe_gate import reference as moe_gate
from pd_kernels.ops import GateConfig, Rows, SamplingRows
from pd_kernels.rms_norm import reference as rms_norm
from pd_kernels.sample import reference as sampling

DEVICE = torch.device("cpu")
VERSION = 1  # raise it with every change of the reference that changes bits


class ReferenceOps:
    """Weights are kept as fp32 copies: bf16 products are slow on CPUs without bf16 instructions, and this is exact."""

    def __init__(self) -> None:
        self._min_rows = linear.choose_min_rows(torch.get_num_threads())

    @property
    def name(self) -> str:
        return "reference"

    @property
    def numerics(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        return f"reference-{VERSION}/torch-{torch.__version__}/{capability}/rows-{self._min_rows}"

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_on_host(self) -> bool:
        return True

    def pack_linear(self, weight_MD: Weight) -> Tensor:
        contract.linear_weight(weight_MD, DEVICE)
        return linear.pack_linear(decoded(weight_MD))

    def pack_absorbed(self, w_uk_HNC: Tensor, w_uv_HVC: Tensor) -> absorb.AbsorbedWeight:
        contract.absorbed_weights(w_uk_HNC, w_uv_HVC, DEVICE)
        return absorb.pack_absorbed(w_uk_HNC, w_uv_HVC)

    def pack_experts(self, gate_up_X2ID: Weight, down_XDI: Weight, shared_gate_up: Weight | None,
                     shared_down: Weight | None) -> moe_experts.Experts:
        contract.expert_weights(gate_up_X2ID, down_XDI, shared_gate_up, shared_down, DEVICE)
        shared = (None if weight is None else decoded(weight) for weight in (shared_gate_up, shared_down))
        return moe_experts.pack_experts(decoded(gate_up_X2ID), decoded(down_XDI), *shared)

    def embed(self, ids_T: Tensor, table_ZD: Tensor) -> Tensor:
        contract.embed(ids_T, table_ZD, DEVICE)
        index_ranges.check_ids(ids_T, table_ZD)
        return embed.embed(ids_T, table_ZD)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        contract.rms_norm(x_TD, weight_D, DEVICE)
        return rms_norm.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, x_scale: float = 1.0,
                     residual_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        contract.add_rms_norm(x_TD, residual_TD, weight_D, DEVICE)
        return rms_norm.add_rms_norm(
            x_TD, residual_TD, weight_D, eps, x_scale=x_scale, residual_scale=residual_scale)

    def linear(self, x_TD: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        contract.linear(x_TD, weight.shape[1], out_dtype, DEVICE)
        return linear.linear(x_TD, weight, self._min_rows, out_dtype)

    def mla_queries(self, q_TF: Tensor, weight: absorb.AbsorbedWeight, rope_P2R: Tensor, positions_T: Tensor) -> Tensor:
        contract.mla_queries(q_TF, weight.num_heads, weight.nope_width, rope_P2R, positions_T, DEVICE)
        index_ranges.check_positions(positions_T, rope_P2R)
        return absorb.mla_queries(q_TF, weight, rope_P2R, positions_T, self._min_rows)

    def latent_write(self, kv_TE: Tensor, norm_weight_C: Tensor, eps: float, rope_P2R: Tensor, rows: Rows,
                     cache_GKE: Tensor) -> None:
        contract.latent_write(kv_TE, norm_weight_C, rope_P2R, rows, cache_GKE, DEVICE)
        index_ranges.check_slots(rows, rope_P2R, cache_GKE)
        latent_write.latent_write(kv_TE, norm_weight_C, eps, rope_P2R, rows, cache_GKE)

    def mla_attention(self, q_THE: Tensor, cache_GKE: Tensor, rows: Rows, scale: float, first_position: int,
                      latent_width: int) -> Tensor:
        contract.mla_attention(q_THE, cache_GKE, rows, first_position, latent_width, DEVICE)
        index_ranges.check_context(rows, cache_GKE, first_position)
        return mla_attention.mla_attention(q_THE, cache_GKE, rows, scale, first_position, latent_width, self._min_rows)

    def absorb_values(self, o_THC: Tensor, weight: absorb.AbsorbedWeight) -> Tensor:
        contract.absorb_values(o_THC, weight.num_heads, weight.latent_width, DEVICE)
        return absorb.absorb_values(o_THC, weight, self._min_rows)

    def mla_attention_expanded(self, q_TF: Tensor, weight: absorb.AbsorbedWeight, rope_P2R: Tensor,
                               cache_GKE: Tensor, rows: Rows, scale: float, first_position: int) -> Tensor:
        contract.mla_attention_expanded(
            q_TF, weight.num_heads, weight.nope_width, weight.latent_width, rope_P2R, cache_GKE, rows, first_position,
            DEVICE)
        index_ranges.check_positions(rows.positions_T, rope_P2R)
        index_ranges.check_context(rows, cache_GKE, first_position)
        return mla_attention.mla_attention_expanded(
            q_TF, weight, rope_P2R, cache_GKE, rows, scale, first_position, self._min_rows
        )

    def moe_gate(self, x_TD: Tensor, weight: Tensor, bias_X: Tensor, config: GateConfig) -> tuple[Tensor, Tensor]:
        contract.moe_gate(x_TD, weight.shape[0], weight.shape[1], bias_X, config, DEVICE)
        return moe_gate.moe_gate(x_TD, weight, bias_X, config, self._min_rows)

    def moe_experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor,
                    experts: moe_experts.Experts, *, shared_scale: float = 1.0) -> Tensor:
        contract.moe_experts(x_TD, weights_TK, experts_TK, experts.down_XDI.shape[1], DEVICE)
        index_ranges.check_experts(experts_TK, experts.down_XDI.shape[0])
        return moe_experts.moe_experts(
            x_TD, weights_TK, experts_TK, experts, self._min_rows, shared_scale=shared_scale)

    def swiglu(self, x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        contract.swiglu(x_TD, gate_up.shape, down.shape, DEVICE)
        return moe_experts.swiglu(x_TD, gate_up, down, self._min_rows)

    def concat_norms(self, a_TD: Tensor, a_weight_D: Tensor, b_TD: Tensor, b_weight_D: Tensor, eps: float) -> Tensor:
        contract.concat_norms(a_TD, a_weight_D, b_TD, b_weight_D, DEVICE)
        return rms_norm.concat_norms(a_TD, a_weight_D, b_TD, b_weight_D, eps)

    def sample(self, logits_TZ: Tensor, rows: SamplingRows) -> npt.NDArray[np.int32]:
        contract.sampling(logits_TZ, rows, DEVICE)
        return sampling.sample(logits_TZ, rows)

    def logprobs(self, logits_TZ: Tensor) -> npt.NDArray[np.float32]:
        contract.logits("logprobs", logits_TZ, DEVICE)
        return sampling.logprobs(logits_TZ)

    def block_checksums(self, pieces: list[memoryview]) -> npt.NDArray[np.uint64]:
        return block_checksum.block_checksums(pieces)
