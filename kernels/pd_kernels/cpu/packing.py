"""Weights in the order in which the CPU ops read them (cpu/matmul.h), packed once at load; FP8 weights stay FP8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pd_kernels.contract import WrongArgument
from pd_kernels.cpu.huge_pages import HugePages
from pd_kernels.fp8_matrix import BLOCK, Fp8Matrix, Weight

LANES = 16
UNIT_NUMBERS = {torch.bfloat16: 2, torch.float32: 1}
DTYPE_CODES = {torch.bfloat16: 0, torch.float32: 1}
FP8 = 2  # the code of e4m3 weights, and of a cache of FP8 slots
CACHE_CODES = DTYPE_CODES | {torch.uint8: FP8}
SCALE_FACTOR = 2.0**120  # the ops make e4m3 numbers 2^120 times too small


def dtype_code(dtype: torch.dtype) -> int:
    """What the libraries call it.

    Raises:
        WrongArgument: they do not compute in it; the reference has fp16 too.
    """
    if dtype not in DTYPE_CODES:
        raise WrongArgument(f"the compiled ops compute in {' and '.join(map(str, DTYPE_CODES))}; got {dtype}")
    return DTYPE_CODES[dtype]


def pack(weight_bNK: Tensor) -> Tensor:
    """[..., N, K] -> [..., ⌈N/16⌉, ⌈K/u⌉, 16, u], zeros in the padding; u = 2 numbers a unit in bf16, else 1."""
    dtype_code(weight_bNK.dtype)
    unit = UNIT_NUMBERS[weight_bNK.dtype]
    *batch, N, K = weight_bNK.shape
    padded = functional.pad(weight_bNK, (0, -K % unit, 0, -N % LANES))
    blocks = padded.reshape(*batch, -(-N // LANES), LANES, -(-K // unit), unit)
    return blocks.transpose(-3, -2).contiguous()


def pack_fp8(weight: Fp8Matrix) -> Tensor:
    """[..., N, K] -> int32 [..., ⌈N/16⌉, ⌈K/128⌉, 1 + 32, 16]: a scale a lane, then units of four e4m3 numbers."""
    *batch, N, K = weight.shape
    codes = functional.pad(weight.codes_MK.view(torch.uint8), (0, -K % BLOCK, 0, -N % LANES))
    codes = codes.reshape(*batch, -(-N // LANES), LANES, -(-K // BLOCK), BLOCK // 4, 4)
    units = codes.movedim(-4, -2).contiguous().view(torch.int32).squeeze(-1)
    scales = functional.pad(weight.scales_Mg * SCALE_FACTOR, (0, 0, 0, -N % LANES))
    scales = scales.reshape(*batch, -(-N // LANES), LANES, -(-K // BLOCK)).transpose(-2, -1).contiguous()
    return torch.cat([scales.view(torch.int32).unsqueeze(-2), units], dim=-2)


def _packed(weight: Weight, pages: HugePages) -> tuple[Tensor, int]:
    """(units, code)."""
    if isinstance(weight, Fp8Matrix):
        return pages.keep(pack_fp8(weight)), FP8
    return pages.keep(pack(weight)), dtype_code(weight.dtype)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """N outputs, K inputs, the code of what the numbers are; `pointer` is that of `units`, which it keeps alive."""

    units: Tensor
    pointer: int
    N: int
    K: int
    code: int


def pack_linear(weight_NK: Weight, pages: HugePages) -> PackedLinear:
    units, code = _packed(weight_NK, pages)
    return PackedLinear(units, units.data_ptr(), weight_NK.shape[0], weight_NK.shape[1], code)


@dataclass(frozen=True, slots=True)
class PackedAbsorbed:
    """kv_b_proj a head, for queries (C outputs, N inputs) and values (V outputs, C inputs); and for the expanded
    form all heads' keys and values as two projections of the latent."""

    w_uk: Tensor
    w_uv: Tensor
    expanded_keys: PackedLinear
    expanded_values: PackedLinear
    w_uk_pointer: int
    w_uv_pointer: int
    H: int
    N: int
    C: int
    V: int
    code: int


def pack_absorbed(w_uk_HNC: Tensor, w_uv_HVC: Tensor, pages: HugePages) -> PackedAbsorbed:
    H, N, C = w_uk_HNC.shape
    w_uk, w_uv = pages.keep(pack(w_uk_HNC.transpose(1, 2))), pages.keep(pack(w_uv_HVC))
    return PackedAbsorbed(
        w_uk, w_uv, pack_linear(w_uk_HNC.reshape(H * N, C), pages), pack_linear(w_uv_HVC.reshape(-1, C), pages),
        w_uk.data_ptr(), w_uv.data_ptr(), H, N, C, w_uv_HVC.shape[1], dtype_code(w_uk_HNC.dtype),
    )


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """All routed experts, and the shared one or None."""

    gate_up: Tensor
    down: Tensor
    shared_gate_up: PackedLinear | None
    shared_down: PackedLinear | None
    gate_up_pointer: int
    down_pointer: int
    shared_gate_up_pointer: int | None
    shared_down_pointer: int | None
    num_experts: int
    inner: int
    shared_inner: int
    D: int
    code: int


def pack_experts(gate_up_X2ID: Weight, down_XDI: Weight, shared_gate_up: Weight | None,
                 shared_down: Weight | None, pages: HugePages) -> PackedExperts:
    assert (shared_gate_up is None) == (shared_down is None)
    (gate_up, code), (down, down_code) = _packed(gate_up_X2ID, pages), _packed(down_XDI, pages)
    up = None if shared_gate_up is None else pack_linear(shared_gate_up, pages)
    out = None if shared_down is None else pack_linear(shared_down, pages)
    assert {code} == {down_code, *(part.code for part in (up, out) if part is not None)}, "experts of several formats"
    return PackedExperts(
        gate_up, down, up, out, gate_up.data_ptr(), down.data_ptr(),
        None if up is None else up.pointer, None if out is None else out.pointer,
        down_XDI.shape[0], down_XDI.shape[2], 0 if out is None else out.K, down_XDI.shape[1], code,
    )
