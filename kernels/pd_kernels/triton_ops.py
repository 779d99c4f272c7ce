"""`Ops` over the Triton kernels, for one GPU.

All tensors are on that GPU, weights in their storage dtype; tensors that are elsewhere are refused, and nothing falls
back to another implementation. Values of indices are not looked at: that would wait for the GPU in every op. Under
Triton's interpreter (TRITON_INTERPRET=1) the device is the CPU: for tests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from pd_kernels import contract
from pd_kernels.absorb import triton as absorb
from pd_kernels.block_checksum import triton as block_checksum
from pd_kernels.embed import triton as embed
from pd_kernels.fp8_gemm.reference import Fp8Weight
from pd_kernels.fp8_gemm.triton import fp8_linear
from pd_kernels.fp8_matrix import Fp8Matrix, Weight
from pd_kernels.gpu import COMPUTE_CAPABILITY
from pd_kernels.latent_write import triton as latent_write
from pd_kernels.linear import triton as linear
from pd_kernels.mla_attention import triton as mla_attention
from pd_kernels.mla_attention import triton_expanded
from pd_kernels.moe_experts import triton as moe_experts
from pd_kernels.moe_gate import triton as moe_gate
from pd_kernels.ops import GateConfig, Rows, SamplingRows
from pd_kernels.rms_norm import triton as rms_norm
from pd_kernels.sample import triton as sampling

VERSION = 1  # raise it with every change that changes bits


class NoGpu(RuntimeError):
    """There is no GPU that the kernels are made for; the message says what was found."""


class TritonOps:
    """The kernels on one device. Packed linear weights are tensors, or FP8 matrices with their scales."""

    def __init__(self, device: torch.device) -> None:
        """Raises NoGpu unless `device` is a Hopper GPU, or the CPU under the interpreter."""
        self._device = device
        self._numerics = f"triton-{VERSION}/{triton.__version__}/{_device_name(device)}"

    @property
    def name(self) -> str:
        return "triton"

    @property
    def numerics(self) -> str:
        return self._numerics

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def is_on_host(self) -> bool:
        """Not under the interpreter either: what works there must not lean on memory that a GPU does not have."""
        return False

    def pack_linear(self, weight_MD: Weight) -> Weight:
        contract.linear_weight(weight_MD, self.device)
        return self._moved(weight_MD)

    def pack_fp8_linear(self, weight_MK: Tensor, scale_mk: Tensor, *, power_of_two: bool = False) -> Fp8Weight:
        """A projection whose activations are quantized too; with scales that are powers of two if asked for."""
        return Fp8Weight(
            weight_MK=weight_MK.to(self.device).contiguous(), scale_mk=scale_mk.to(self.device).contiguous(),
            power_of_two=power_of_two,
        )

    def pack_absorbed(self, w_uk_HNC: Tensor, w_uv_HVC: Tensor) -> absorb.AbsorbedWeight:
        contract.absorbed_weights(w_uk_HNC, w_uv_HVC, self.device)
        return absorb.pack_absorbed(w_uk_HNC.to(self.device), w_uv_HVC.to(self.device))

    def pack_experts(self, gate_up_X2ID: Weight, down_XDI: Weight, shared_gate_up: Weight | None,
                     shared_down: Weight | None) -> moe_experts.Experts:
        contract.expert_weights(gate_up_X2ID, down_XDI, shared_gate_up, shared_down, self.device)
        shared = (weight if weight is None else self._moved(weight) for weight in (shared_gate_up, shared_down))
        return moe_experts.pack_experts(self._moved(gate_up_X2ID), self._moved(down_XDI), *shared)

    def embed(self, ids_T: Tensor, table_ZD: Tensor) -> Tensor:
        contract.embed(ids_T, table_ZD, self.device)
        return embed.embed(ids_T, table_ZD)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        contract.rms_norm(x_TD, weight_D, self.device)
        return rms_norm.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, x_scale: float = 1.0,
                     residual_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        contract.add_rms_norm(x_TD, residual_TD, weight_D, self.device)
        return rms_norm.add_rms_norm(
            x_TD, residual_TD, weight_D, eps, x_scale=x_scale, residual_scale=residual_scale)

    def linear(self, x_TD: Tensor, weight: Weight | Fp8Weight, *, out_dtype: torch.dtype | None = None) -> Tensor:
        contract.linear(x_TD, _shape(weight)[1], out_dtype, self.device)
        if isinstance(weight, Fp8Weight):
            return fp8_linear(x_TD, weight, out_dtype)
        return linear.linear(x_TD, weight, out_dtype)

    def mla_queries(self, q_TF: Tensor, weight: absorb.AbsorbedWeight, rope_P2R: Tensor, positions_T: Tensor) -> Tensor:
        H, N, _ = weight.w_uk_HNC.shape
        contract.mla_queries(q_TF, H, N, rope_P2R, positions_T, self.device)
        return absorb.mla_queries(q_TF, weight, rope_P2R, positions_T)

    def latent_write(self, kv_TE: Tensor, norm_weight_C: Tensor, eps: float, rope_P2R: Tensor, rows: Rows,
                     cache_GKE: Tensor) -> None:
        contract.latent_write(kv_TE, norm_weight_C, rope_P2R, rows, cache_GKE, self.device)
        latent_write.latent_write(kv_TE, norm_weight_C, eps, rope_P2R, rows, cache_GKE)

    def mla_attention(self, q_THE: Tensor, cache_GKE: Tensor, rows: Rows, scale: float, first_position: int,
                      latent_width: int) -> Tensor:
        contract.mla_attention(q_THE, cache_GKE, rows, first_position, latent_width, self.device)
        return mla_attention.mla_attention(q_THE, cache_GKE, rows, scale, first_position, latent_width)

    def absorb_values(self, o_THC: Tensor, weight: absorb.AbsorbedWeight) -> Tensor:
        H, _, C = weight.w_uk_HNC.shape
        contract.absorb_values(o_THC, H, C, self.device)
        return absorb.absorb_values(o_THC, weight)

    def mla_attention_expanded(self, q_TF: Tensor, weight: absorb.AbsorbedWeight, rope_P2R: Tensor,
                               cache_GKE: Tensor, rows: Rows, scale: float, first_position: int) -> Tensor:
        """Rows of a sequence must be consecutive, and sequences in ascending order."""
        H, N, C = weight.w_uk_HNC.shape
        contract.mla_attention_expanded(q_TF, H, N, C, rope_P2R, cache_GKE, rows, first_position, self.device)
        return triton_expanded.mla_attention_expanded(q_TF, weight, rope_P2R, cache_GKE, rows, scale, first_position)

    def moe_gate(self, x_TD: Tensor, weight: Tensor, bias_X: Tensor, config: GateConfig) -> tuple[Tensor, Tensor]:
        contract.moe_gate(x_TD, weight.shape[0], weight.shape[1], bias_X, config, self.device)
        return moe_gate.moe_gate(x_TD, weight, bias_X, config)

    def moe_experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor,
                    experts: moe_experts.Experts, *, shared_scale: float = 1.0) -> Tensor:
        contract.moe_experts(x_TD, weights_TK, experts_TK, _shape(experts.down)[1], self.device)
        return moe_experts.moe_experts(x_TD, weights_TK, experts_TK, experts, shared_scale=shared_scale)

    def swiglu(self, x_TD: Tensor, gate_up: Weight | Fp8Weight, down: Weight | Fp8Weight) -> Tensor:
        contract.swiglu(x_TD, _shape(gate_up), _shape(down), self.device)
        return moe_experts.swiglu(x_TD, gate_up, down)

    def concat_norms(self, a_TD: Tensor, a_weight_D: Tensor, b_TD: Tensor, b_weight_D: Tensor, eps: float) -> Tensor:
        contract.concat_norms(a_TD, a_weight_D, b_TD, b_weight_D, self.device)
        return rms_norm.concat_norms(a_TD, a_weight_D, b_TD, b_weight_D, eps)

    def sample(self, logits_TZ: Tensor, rows: SamplingRows) -> npt.NDArray[np.int32]:
        contract.sampling(logits_TZ, rows, self.device)
        return sampling.sample(logits_TZ, rows)

    def logprobs(self, logits_TZ: Tensor) -> npt.NDArray[np.float32]:
        contract.logits("logprobs", logits_TZ, self.device)
        return sampling.logprobs(logits_TZ)

    def block_checksums(self, pieces: list[memoryview]) -> npt.NDArray[np.uint64]:
        """Of pieces in host memory: they are copied to the device. `piece_checksums` takes what is there already."""
        lengths = np.array([piece.nbytes for piece in pieces], dtype=np.int64)
        rounded = -(-lengths // 4) * 4
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(rounded)])
        staged = np.zeros(int(offsets[-1]), dtype=np.uint8)
        for piece, offset in zip(pieces, offsets[:-1].tolist(), strict=True):
            staged[offset : offset + piece.nbytes] = np.frombuffer(piece, dtype=np.uint8)
        sums = block_checksum.piece_checksums(
            torch.from_numpy(staged).to(self.device), torch.from_numpy(offsets[:-1]).to(self.device),
            torch.from_numpy(lengths).to(self.device),
        )
        return sums.cpu().numpy().view(np.uint64)

    def _moved(self, weight: Weight) -> Weight:
        if isinstance(weight, Fp8Matrix):
            return Fp8Matrix(
                codes_MK=weight.codes_MK.to(self.device).contiguous(),
                scales_Mg=weight.scales_Mg.to(self.device).contiguous(),
            )
        return weight.to(self.device).contiguous()


def _shape(weight: Weight | Fp8Weight) -> torch.Size:
    return weight.weight_MK.shape if isinstance(weight, Fp8Weight) else weight.shape


def _device_name(device: torch.device) -> str:
    """What decides about the bits: the interpreter, or the GPU's name."""
    if triton.knobs.runtime.interpret:
        if device.type != "cpu":
            raise NoGpu(f"under TRITON_INTERPRET=1 the device is the CPU, not {device}")
        return "interpreter"
    if device.type != "cuda" or not torch.cuda.is_available():
        raise NoGpu(f"the Triton kernels need an NVIDIA GPU and a CUDA build of torch; {device} is not available here")
    capability = torch.cuda.get_device_capability(device)
    if capability != COMPUTE_CAPABILITY:
        raise NoGpu(
            f"the Triton kernels are tiled for Hopper (compute capability 9.0); {torch.cuda.get_device_name(device)} "
            f"has {capability[0]}.{capability[1]}"
        )
    return f"sm_90/{torch.cuda.get_device_name(device).replace(' ', '-')}"
