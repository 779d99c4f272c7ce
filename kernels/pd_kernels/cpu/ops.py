"""`Ops` over the compiled libraries. Each method is one call into C++: check, allocate the result, pass pointers.

Activations may be slices of wider rows (a part of a fused projection); they need not be copied first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_kernels import contract, index_ranges
from pd_kernels.contract import WrongArgument
from pd_kernels.cpu import packing
from pd_kernels.cpu.huge_pages import HugePages
from pd_kernels.cpu.native import load_library, numerics
from pd_kernels.cpu.packing import (
    CACHE_CODES,
    DTYPE_CODES,
    FP8,
    PackedAbsorbed,
    PackedExperts,
    PackedLinear,
    dtype_code,
)
from pd_kernels.cpu.recording import (
    MAX_ROWS,
    OnlyOps,
    Program,
    Recorder,
    Recording,
    Recordings,
    SlabsFull,
    StepFunction,
)
from pd_kernels.fp8_matrix import Weight
from pd_kernels.ops import GateConfig, Rows, SamplingRows

DEVICE = torch.device("cpu")


class CpuOps:
    """The ops of one instruction set. The number of threads is the process's, and changes no bits."""

    def __init__(self, isa: str, *, threads: int, directory: Path | None = None) -> None:
        """Args:
        isa: a name of `usable_isas()`.
        directory: of the library, if not the package's own.
        """
        self._library = load_library(isa, directory)
        self._lib: Any = self._library  # a Recorder while a step is recorded
        self._empty: Callable[..., Tensor] = torch.empty
        self._isa = isa
        self._numerics = numerics(self._library)
        self._recordings: dict[str, Recordings] = {}
        self._pages = HugePages()
        self._lib.pd_set_num_threads(threads)

    @property
    def name(self) -> str:
        return f"cpu-{self._isa}"

    @property
    def numerics(self) -> str:
        """What decides the bits: instruction sets with the same one give the same."""
        return self._numerics

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_on_host(self) -> bool:
        return True

    def pack_linear(self, weight_MD: Weight) -> PackedLinear:
        contract.linear_weight(weight_MD, DEVICE)
        return packing.pack_linear(weight_MD, self._pages)

    def pack_absorbed(self, w_uk_HNC: Tensor, w_uv_HVC: Tensor) -> PackedAbsorbed:
        contract.absorbed_weights(w_uk_HNC, w_uv_HVC, DEVICE)
        return packing.pack_absorbed(w_uk_HNC, w_uv_HVC, self._pages)

    def pack_experts(self, gate_up_X2ID: Weight, down_XDI: Weight, shared_gate_up: Weight | None,
                     shared_down: Weight | None) -> PackedExperts:
        contract.expert_weights(gate_up_X2ID, down_XDI, shared_gate_up, shared_down, DEVICE)
        return packing.pack_experts(gate_up_X2ID, down_XDI, shared_gate_up, shared_down, self._pages)

    def embed(self, ids_T: Tensor, table_ZD: Tensor) -> Tensor:
        contract.embed(ids_T, table_ZD, DEVICE)
        T, (Z, D) = ids_T.shape[0], table_ZD.shape
        out = self._empty(T, D, dtype=table_ZD.dtype)
        bad = self._lib.pd_embed(
            ids_T.data_ptr(), T, table_ZD.data_ptr(), Z, D * table_ZD.element_size(), out.data_ptr())
        if bad >= 0:
            raise index_ranges.bad_id(ids_T, bad, table_ZD)
        return out

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        contract.rms_norm(x_TD, weight_D, DEVICE)
        T, D = x_TD.shape
        out = self._empty(T, D, dtype=x_TD.dtype)
        self._lib.pd_rms_norm(dtype_code(x_TD.dtype), x_TD.data_ptr(), x_TD.stride(0), T, D, weight_D.data_ptr(),
                              eps, out.data_ptr(), D)
        return out

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, x_scale: float = 1.0,
                     residual_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        contract.add_rms_norm(x_TD, residual_TD, weight_D, DEVICE)
        if not (x_TD.is_contiguous() and residual_TD.is_contiguous()):
            raise WrongArgument("add_rms_norm: x_TD and residual_TD must be contiguous here")
        if not x_scale == residual_scale == 1:
            raise WrongArgument(f"add_rms_norm: scales are of fp16, not computed here; got {x_scale, residual_scale}")
        T, D = x_TD.shape
        out, total = self._empty(T, D, dtype=x_TD.dtype), self._empty(T, D, dtype=x_TD.dtype)
        self._lib.pd_add_rms_norm(dtype_code(x_TD.dtype), x_TD.data_ptr(), residual_TD.data_ptr(), T, D,
                                  weight_D.data_ptr(), eps, out.data_ptr(), total.data_ptr())
        return out, total

    def linear(self, x_TD: Tensor, weight: PackedLinear, *, out_dtype: torch.dtype | None = None) -> Tensor:
        contract.linear(x_TD, weight.K, out_dtype, DEVICE)
        T, K = x_TD.shape
        code = _code_beside("linear: weight", x_TD, weight.code, FP8)
        dtype = out_dtype or x_TD.dtype
        out = self._empty(T, weight.N, dtype=dtype)
        self._lib.pd_linear(code, x_TD.data_ptr(), x_TD.stride(0), T, weight.code, weight.pointer, K, weight.N,
                            out.data_ptr(), dtype_code(dtype))
        return out

    def mla_queries(self, q_TF: Tensor, weight: PackedAbsorbed, rope_P2R: Tensor, positions_T: Tensor) -> Tensor:
        contract.mla_queries(q_TF, weight.H, weight.N, rope_P2R, positions_T, DEVICE)
        T, P, R = q_TF.shape[0], rope_P2R.shape[0], 2 * rope_P2R.shape[2]
        _code_beside("mla_queries: weight", q_TF, weight.code)
        out = self._empty(T, weight.H, weight.C + R, dtype=q_TF.dtype)
        bad = self._lib.pd_mla_queries(
            weight.code, q_TF.data_ptr(), q_TF.stride(0), T, weight.H, weight.N, R, weight.C, weight.w_uk_pointer,
            rope_P2R.data_ptr(), P, positions_T.data_ptr(), out.data_ptr())
        if bad >= 0:
            raise index_ranges.bad_position(positions_T, bad, rope_P2R)
        return out

    def latent_write(self, kv_TE: Tensor, norm_weight_C: Tensor, eps: float, rope_P2R: Tensor, rows: Rows,
                     cache_GKE: Tensor) -> None:
        contract.latent_write(kv_TE, norm_weight_C, rope_P2R, rows, cache_GKE, DEVICE)
        T, E = kv_TE.shape
        C, (G, K, _) = norm_weight_C.shape[0], cache_GKE.shape
        bad = self._lib.pd_latent_write(
            dtype_code(kv_TE.dtype), kv_TE.data_ptr(), kv_TE.stride(0), T, C, E - C, norm_weight_C.data_ptr(), eps,
            rope_P2R.data_ptr(), rope_P2R.shape[0], rows.positions_T.data_ptr(), rows.slots_T.data_ptr(),
            CACHE_CODES[cache_GKE.dtype], cache_GKE.data_ptr(), G * K)
        if bad >= 0:
            raise index_ranges.bad_slot(rows, bad, rope_P2R, cache_GKE)

    def mla_attention(self, q_THE: Tensor, cache_GKE: Tensor, rows: Rows, scale: float, first_position: int,
                      latent_width: int) -> Tensor:
        contract.mla_attention(q_THE, cache_GKE, rows, first_position, latent_width, DEVICE)
        T, H, E = q_THE.shape
        G, K, _ = cache_GKE.shape
        S, B = rows.block_tables_SB.shape
        out = self._empty(T, H, latent_width, dtype=q_THE.dtype)
        bad = self._lib.pd_mla_attention(
            dtype_code(q_THE.dtype), q_THE.data_ptr(), T, H, E, latent_width, CACHE_CODES[cache_GKE.dtype],
            cache_GKE.data_ptr(), G, K, rows.positions_T.data_ptr(), rows.sequence_T.data_ptr(),
            rows.block_tables_SB.data_ptr(), S, B, scale, first_position, out.data_ptr())
        if bad >= 0:
            raise index_ranges.bad_context(rows, bad, cache_GKE)
        return out

    def absorb_values(self, o_THC: Tensor, weight: PackedAbsorbed) -> Tensor:
        contract.absorb_values(o_THC, weight.H, weight.C, DEVICE)
        T, H, C = o_THC.shape
        _code_beside("absorb_values: weight", o_THC, weight.code)
        out = self._empty(T, H * weight.V, dtype=o_THC.dtype)
        self._lib.pd_absorb_values(
            weight.code, o_THC.data_ptr(), T, H, C, weight.V, weight.w_uv_pointer, out.data_ptr())
        return out

    def mla_attention_expanded(self, q_TF: Tensor, weight: PackedAbsorbed, rope_P2R: Tensor, cache_GKE: Tensor,
                               rows: Rows, scale: float, first_position: int) -> Tensor:
        contract.mla_attention_expanded(
            q_TF, weight.H, weight.N, weight.C, rope_P2R, cache_GKE, rows, first_position, DEVICE)
        T, P, R = q_TF.shape[0], rope_P2R.shape[0], 2 * rope_P2R.shape[2]
        G, K, _ = cache_GKE.shape
        S, B = rows.block_tables_SB.shape
        _code_beside("mla_attention_expanded: weight", q_TF, weight.code)
        out = self._empty(T, weight.H * weight.V, dtype=q_TF.dtype)
        bad = self._lib.pd_mla_attention_expanded(
            weight.code, q_TF.data_ptr(), q_TF.stride(0), T, weight.H, weight.N, R, weight.C, weight.V,
            weight.expanded_keys.pointer, weight.expanded_values.pointer, rope_P2R.data_ptr(), P,
            CACHE_CODES[cache_GKE.dtype], cache_GKE.data_ptr(), G, K, rows.positions_T.data_ptr(),
            rows.sequence_T.data_ptr(), rows.block_tables_SB.data_ptr(), S, B, scale, first_position, out.data_ptr())
        if bad >= 0:
            raise index_ranges.bad_context(rows, bad, cache_GKE, rope_P2R)
        return out

    def moe_gate(self, x_TD: Tensor, weight: PackedLinear, bias_X: Tensor,
                 config: GateConfig) -> tuple[Tensor, Tensor]:
        contract.moe_gate(x_TD, weight.N, weight.K, bias_X, config, DEVICE)
        T, D = x_TD.shape
        _code_beside("moe_gate: weight", x_TD, weight.code)
        weights = self._empty(T, config.num_experts_per_token)
        experts = self._empty(T, config.num_experts_per_token, dtype=torch.int32)
        self._lib.pd_moe_gate(
            weight.code, x_TD.data_ptr(), x_TD.stride(0), T, D, weight.pointer, bias_X.data_ptr(), weight.N,
            config.num_groups, config.num_groups_kept, config.num_experts_per_token, config.normalize, config.scale,
            weights.data_ptr(), experts.data_ptr())
        return weights, experts

    def moe_experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: PackedExperts, *,
                    shared_scale: float = 1.0) -> Tensor:
        contract.moe_experts(x_TD, weights_TK, experts_TK, experts.D, DEVICE)
        if shared_scale != 1:
            raise WrongArgument(f"moe_experts: a scale is of fp16, not computed here; got {shared_scale}")
        T, D = x_TD.shape
        code = _code_beside("moe_experts: experts", x_TD, experts.code, FP8)
        out = self._empty(T, D, dtype=x_TD.dtype)
        bad = self._lib.pd_moe_experts(
            code, x_TD.data_ptr(), x_TD.stride(0), T, D, experts.inner, experts.num_experts, experts.code,
            experts.gate_up_pointer, experts.down_pointer, experts.shared_inner, experts.shared_gate_up_pointer,
            experts.shared_down_pointer, weights_TK.data_ptr(), experts_TK.data_ptr(), experts_TK.shape[1],
            out.data_ptr())
        if bad >= 0:
            raise index_ranges.bad_expert(experts_TK, bad, experts.num_experts)
        return out

    def swiglu(self, x_TD: Tensor, gate_up: PackedLinear, down: PackedLinear) -> Tensor:
        contract.swiglu(x_TD, (gate_up.N, gate_up.K), (down.N, down.K), DEVICE)
        T, D = x_TD.shape
        code = _code_beside("swiglu: gate_up", x_TD, gate_up.code, FP8)
        if down.code != gate_up.code:
            raise WrongArgument("swiglu: both weights must be FP8, or neither")
        out = self._empty(T, D, dtype=x_TD.dtype)
        self._lib.pd_swiglu(code, x_TD.data_ptr(), x_TD.stride(0), T, D, down.K, down.code, gate_up.pointer,
                            down.pointer, out.data_ptr())
        return out

    def concat_norms(self, a_TD: Tensor, a_weight_D: Tensor, b_TD: Tensor, b_weight_D: Tensor, eps: float) -> Tensor:
        contract.concat_norms(a_TD, a_weight_D, b_TD, b_weight_D, DEVICE)
        T, D = a_TD.shape
        out = self._empty(T, 2 * D, dtype=a_TD.dtype)
        code, pointer = dtype_code(a_TD.dtype), out.data_ptr()
        self._lib.pd_rms_norm(
            code, a_TD.data_ptr(), a_TD.stride(0), T, D, a_weight_D.data_ptr(), eps, pointer, 2 * D)
        self._lib.pd_rms_norm(code, b_TD.data_ptr(), b_TD.stride(0), T, D, b_weight_D.data_ptr(), eps,
                              pointer + D * out.element_size(), 2 * D)
        return out

    def sample(self, logits_TZ: Tensor, rows: SamplingRows) -> npt.NDArray[np.int32]:
        contract.sampling(logits_TZ, rows, DEVICE)
        T, Z = logits_TZ.shape
        tokens = np.empty(T, dtype=np.int32)
        self._lib.pd_sample(
            logits_TZ.data_ptr(), T, Z, rows.temperature_T.ctypes.data, rows.top_k_T.ctypes.data,
            rows.top_p_T.ctypes.data, rows.min_p_T.ctypes.data, rows.seed_T.ctypes.data, rows.position_T.ctypes.data,
            tokens.ctypes.data)
        return tokens

    def logprobs(self, logits_TZ: Tensor) -> npt.NDArray[np.float32]:
        contract.logits("logprobs", logits_TZ, DEVICE)
        T, Z = logits_TZ.shape
        out = np.empty((T, Z), dtype=np.float32)
        self._lib.pd_logprobs(logits_TZ.data_ptr(), T, Z, out.ctypes.data)
        return out

    def block_checksums(self, pieces: list[memoryview]) -> npt.NDArray[np.uint64]:
        arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
        addresses = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
        num_bytes = np.array([len(array) for array in arrays], dtype=np.int64)
        base = int(addresses.min(initial=2**62))
        offsets = addresses - base
        out = np.empty(len(pieces), dtype=np.uint64)
        # Not `_lib`: transfers call this from threads of their own, while a step may be recorded.
        self._library.pd_checksums(base, len(pieces), offsets.ctypes.data, num_bytes.ctypes.data, out.ctypes.data)
        return out

    def repeat(
        self, name: str, function: StepFunction, tensors: tuple[Tensor, ...], rows: Rows, variant: int = 0
    ) -> tuple[Tensor, ...]:
        """`pd_kernels.repeat`: records the ops of the first call with a name, number of rows and variant, and repeats
        them."""
        num_rows, (num_sequences, table_width) = rows.positions_T.shape[0], rows.block_tables_SB.shape
        if not 0 < num_rows <= MAX_ROWS or num_sequences > MAX_ROWS:
            return function(tensors, rows)
        recordings = self._recordings.get(name)
        if recordings is None or recordings.inputs.table_width < table_width:
            recordings = Recordings(tensors, 2 * table_width)
        if recordings.too_large:
            return function(tensors, rows)
        recordings.inputs.put(tensors, rows)
        recording = recordings.by_rows.get((num_rows, variant))
        if recording is not None:
            recording.program.run()
            return recording.results
        try:
            results = self._record(recordings, num_rows, variant, function)
        except SlabsFull:
            recordings.too_large = True
            results = function(tensors, rows)
        self._recordings[name] = recordings  # not before: what a refused call was given would bind those after it
        return results

    def _record(
        self, recordings: Recordings, num_rows: int, variant: int, function: StepFunction
    ) -> tuple[Tensor, ...]:
        library, empty = self._lib, self._empty
        recorder = Recorder(library, recordings.slabs)
        self._lib, self._empty = recorder, recorder.empty
        try:
            with OnlyOps():
                results = function(*recordings.inputs.of(num_rows))
        finally:
            self._lib, self._empty = library, empty
        recordings.by_rows[num_rows, variant] = Recording(Program(library, recorder.calls), results)
        return results


def _code_beside(what: str, x: Tensor, stored: int, *also: int) -> int:
    """The code of the dtype of x, which a weight stored in `stored` must have too, if not one of `also`."""
    code = dtype_code(x.dtype)
    if stored != code and stored not in also:
        names = {number: str(dtype) for dtype, number in DTYPE_CODES.items()} | {FP8: "FP8"}
        raise WrongArgument(f"{what} must be {' or '.join(names[one] for one in (code, *also))}; got {names[stored]}")
    return code
