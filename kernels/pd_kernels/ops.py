"""The op boundary: everything the engine computes goes through one `Ops` object, chosen explicitly.

Shape suffixes: T rows of a step (query tokens, packed over sequences), D hidden, H heads, N no-position head dim,
R rope dim, C latent (kv_lora_rank), E = C + R cache width, V value head dim, X experts, K experts a token,
I expert width, S sequences, B blocks of a table, Z vocabulary, P positions.

Contract of every op: rows are bitwise independent. Row t of a result depends on row t of the inputs (and, in
attention, on the cached slots of its own sequence up to its own position) and never on T, on the other rows, on
the block size, on how a prompt was chunked or on the number of threads. Arithmetic is fp32 inside, whatever the
storage dtype; one rounding at each stated output. Ties go to the lowest index. NaN in a slot that a row may not
see never reaches that row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_kernels.fp8_matrix import Weight

ATTENTION_TILE = 64  # keys; context is reduced in tiles at fixed absolute positions, in order, with an online softmax

Packed = Any  # a weight as `pack_*` of the same Ops object returned it


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Where the rows of one step stand. All tensors are contiguous and on the device of the ops.

    Attributes:
        positions_T: int32, absolute position of each row in its sequence.
        sequence_T: int32, row of `block_tables_SB` that each row belongs to.
        block_tables_SB: int32, block ids of each sequence in order; unused entries are -1.
        slots_T: int64, where each row's own latent is written: block id * block size + position % block size.
    """

    positions_T: Tensor
    sequence_T: Tensor
    block_tables_SB: Tensor
    slots_T: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """The noaux_tc router (DeepSeek-V3 report, section 2.1.2)."""

    num_groups: int
    num_groups_kept: int
    num_experts_per_token: int
    normalize: bool
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Per-row sampling parameters, T long.

    Attributes:
        temperature_T: float32, finite, not below 0; 0 is greedy.
        top_k_T: int32; -1 is no limit.
        top_p_T: float32 in [0, 1]; 0, which tiny ones round to, leaves the best entry.
        min_p_T: float32 in [0, 1]; 0 is no limit.
        seed_T: uint64.
        position_T: int64, the absolute position of the token being sampled; keys the noise.
    """

    temperature_T: npt.NDArray[np.float32]
    top_k_T: npt.NDArray[np.int32]
    top_p_T: npt.NDArray[np.float32]
    min_p_T: npt.NDArray[np.float32]
    seed_T: npt.NDArray[np.uint64]
    position_T: npt.NDArray[np.int64]


class Ops(Protocol):
    """One implementation of all ops. Storage dtypes: bfloat16, float32 and, but for the compiled CPU ops, float16.

    A `Weight` is a tensor in the storage dtype or an `Fp8Matrix`. A cache of uint8 holds FP8 slots
    (pd_kernels.latent_fp8), and its last dim is their bytes; else a cache has the storage dtype and E numbers a slot.
    """

    @property
    def name(self) -> str:
        """Such as "reference", "cpu-avx2"."""

    @property
    def numerics(self) -> str:
        """Names the bits that this implementation produces: part of the fingerprint, so that workers whose
        results could differ in rounding do not share blocks."""

    @property
    def device(self) -> torch.device:
        """Where all tensors are; what is returned as numpy is on the host."""

    @property
    def is_on_host(self) -> bool:
        """Whether a cache may be in the host's shared memory."""

    # Weights, packed once at load.
    def pack_linear(self, weight_MD: Weight) -> Packed:
        """A projection y = x W^T."""

    def pack_absorbed(self, w_uk_HNC: Tensor, w_uv_HVC: Tensor) -> Packed:
        """Both halves of kv_b_proj, split a head."""

    def pack_experts(self, gate_up_X2ID: Weight, down_XDI: Weight, shared_gate_up: Weight | None,
                     shared_down: Weight | None) -> Packed:
        """Routed experts ([gate; up] stacked on dim 1) and the shared expert (2·Is × D and D × Is) or None: all in FP8,
        or none."""

    # The forward pass.
    def embed(self, ids_T: Tensor, table_ZD: Tensor) -> Tensor:
        """Rows of the table: x_TD."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """y = w · x / sqrt(mean(x²) + eps), rounded once."""

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, x_scale: float = 1.0,
                     residual_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """(y_TD, sum_TD): sum = residual_scale · residual + x_scale · x rounded to the dtype, y = rms_norm(sum). Scales
        other than 1 are for fp16."""

    def linear(self, x_TD: Tensor, weight: Packed, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """x W^T: y_TM in `out_dtype`, the dtype of x by default; the head asks for float32."""

    def mla_queries(self, q_TF: Tensor, weight: Packed, rope_P2R: Tensor, positions_T: Tensor) -> Tensor:
        """From q_b's output (F = H·(N+R), per head [nope | rope]) the absorbed queries
        q_THE = [q_nope W_uk | rope(q_rope)], rounded once to the dtype of q."""

    def latent_write(self, kv_TE: Tensor, norm_weight_C: Tensor, eps: float, rope_P2R: Tensor, rows: Rows,
                     cache_GKE: Tensor) -> None:
        """From kv_a's output [c_raw C | k_rope R] write [rms_norm(c_raw) | rope(k_rope)], rounded once, to each row's
        slot of one component (blocks G, slots a block K). `rope_P2R` is [P, 2, R/2] float32: cos then sin; pairs
        interleaved."""

    def mla_attention(self, q_THE: Tensor, cache_GKE: Tensor, rows: Rows, scale: float, first_position: int,
                      latent_width: int) -> Tensor:
        """Absorbed attention of each row over its sequence's slots first_position..own position: o_THC in q's dtype,
        C = `latent_width` leading numbers of a slot. Reads latents as the cache stores them, those of this step
        included; a row that may see nothing gives zeros."""

    def absorb_values(self, o_THC: Tensor, weight: Packed) -> Tensor:
        """o W_uv^T a head, heads concatenated: [T, H·V]."""

    def mla_attention_expanded(self, q_TF: Tensor, weight: Packed, rope_P2R: Tensor, cache_GKE: Tensor, rows: Rows,
                               scale: float, first_position: int) -> Tensor:
        """The same attention with keys and values expanded a head from the latents: [T, H·V]. Equal to the absorbed
        form up to rounding only."""

    def moe_gate(self, x_TD: Tensor, weight: Packed, bias_X: Tensor, config: GateConfig) -> tuple[Tensor, Tensor]:
        """(weights_TK float32, experts_TK int32), best first, ties to the lowest index."""

    def moe_experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Packed, *,
                    shared_scale: float = 1.0) -> Tensor:
        """Σ_k weights[k]·Expert(x), summed in rank order, + shared_scale·Shared(x): y_TD, rounded once at the end.
        Another scale than 1 is for fp16."""

    def swiglu(self, x_TD: Tensor, gate_up: Packed, down: Packed) -> Tensor:
        """down(silu(gate x) · up x): the dense MLP. The product is rounded to the dtype of x before `down`."""

    def concat_norms(self, a_TD: Tensor, a_weight_D: Tensor, b_TD: Tensor, b_weight_D: Tensor, eps: float) -> Tensor:
        """[rms_norm(a) | rms_norm(b)]: the input of MTP's eh_proj, [T, 2·D]."""

    # Choosing tokens.
    def sample(self, logits_TZ: Tensor, rows: SamplingRows) -> npt.NDArray[np.int32]:
        """The token of each row: argmax of what temperature, min-p, top-k and top-p leave of the logits, plus
        position-keyed Gumbel noise."""

    def logprobs(self, logits_TZ: Tensor) -> npt.NDArray[np.float32]:
        """log softmax of the unprocessed logits, float32 [T, Z]."""

    # Cache blocks.
    def block_checksums(self, pieces: list[memoryview]) -> npt.NDArray[np.uint64]:
        """One checksum a piece (pd_kernels.block_checksum.reference has the definition)."""
