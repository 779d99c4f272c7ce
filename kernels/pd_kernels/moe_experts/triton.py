"""Experts on a GPU: pairs of (token, expert) sorted by expert, then grouped products with SwiGLU fused between.

A token's shared expert counts as further experts that every token chooses with weight 1: a shared expert of n times
the routed width is the sum of n experts of that width. A pair's row goes through tiles of one expert's rows; which
rows share a tile does not change its bits. The pairs' results, float32, are added in rank order.

The dense MLP is the same with one expert, and all its rows in order. FP8 weights are multiplied with tokens and
products as they are (`Fp8Matrix`), or, as `Fp8Weight`, with both rounded to e4m3 first (fp8_gemm).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.elementary.triton import silu
from pd_kernels.fp8_gemm.reference import Fp8Weight
from pd_kernels.fp8_gemm.triton import fp8_linear
from pd_kernels.fp8_matrix import Fp8Matrix, Weight
from pd_kernels.fp8_quant.triton import fp8_quant
from pd_kernels.linear.triton import (
    GROUP_FP8,
    SCALED_BLOCKS,
    SCALED_ROWS,
    add_products,
    linear,
    scales_kind,
    scales_of,
)
from pd_kernels.moe_experts.triton_pairs import Pairs, add_ranks, find_tile, num_tiles, sort_by_expert

MAX_ROWS_SMALL = 64  # rows an expert, on average, up to which small tiles are taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    block_t: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


# Of few and of many rows an expert, by the dtype of x.
UP_TILES_16_BIT = (Tile(block_t=64, block_m=64, block_k=64, num_warps=4, num_stages=4),
                   Tile(block_t=128, block_m=128, block_k=64, num_warps=8, num_stages=3))
DOWN_TILES_16_BIT = (Tile(block_t=64, block_m=128, block_k=64, num_warps=4, num_stages=4),
                     Tile(block_t=128, block_m=256, block_k=64, num_warps=8, num_stages=3))
UP_TILES = {
    torch.bfloat16: UP_TILES_16_BIT, torch.float16: UP_TILES_16_BIT,
    torch.float8_e4m3fn: (Tile(block_t=64, block_m=64, block_k=128, num_warps=4, num_stages=4),
                          Tile(block_t=128, block_m=64, block_k=128, num_warps=8, num_stages=4)),
    torch.float32: (Tile(block_t=64, block_m=32, block_k=32, num_warps=4, num_stages=3),) * 2,
}
UP_TILES_MIXED = (Tile(block_t=64, block_m=64, block_k=128, num_warps=4, num_stages=3),
                  Tile(block_t=128, block_m=64, block_k=128, num_warps=8, num_stages=3))
DOWN_TILES_MIXED = (Tile(block_t=64, block_m=128, block_k=128, num_warps=4, num_stages=3),
                    Tile(block_t=128, block_m=128, block_k=128, num_warps=8, num_stages=3))
DOWN_TILES = {
    torch.bfloat16: DOWN_TILES_16_BIT, torch.float16: DOWN_TILES_16_BIT,
    torch.float8_e4m3fn: (Tile(block_t=64, block_m=128, block_k=128, num_warps=4, num_stages=4),
                          Tile(block_t=128, block_m=128, block_k=128, num_warps=8, num_stages=4)),
    torch.float32: (Tile(block_t=64, block_m=32, block_k=32, num_warps=4, num_stages=3),) * 2,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """gate_up [X, 2·I, D] and down [X, D, I] of the routed experts, then of the shared one's parts."""

    gate_up: Tensor | Fp8Matrix | Fp8Weight
    down: Tensor | Fp8Matrix | Fp8Weight
    num_shared: int


def pack_experts(gate_up_X2ID: Weight, down_XDI: Weight, shared_gate_up: Weight | None,
                 shared_down: Weight | None) -> Experts:
    """Routed and shared experts as one stack: all of them FP8, or none."""
    if shared_gate_up is None or shared_down is None:
        return Experts(gate_up=gate_up_X2ID, down=down_XDI, num_shared=0)
    width = down_XDI.shape[2]
    num_shared, rest = divmod(shared_down.shape[1], width)
    assert rest == 0, f"the shared expert is {shared_down.shape[1]} wide, no multiple of the routed ones' {width}"
    if isinstance(shared_down, Fp8Matrix) and num_shared > 1:
        assert width % GROUP_FP8 == 0, f"parts of an FP8 shared expert must be whole groups of 128 wide, got {width}"

    def up_parts(rows_2I: Tensor) -> Tensor:
        split: Tensor = rows_2I.unflatten(0, (2, num_shared, width))
        return split.transpose(0, 1).flatten(1, 2)

    def down_parts(columns_DI: Tensor) -> Tensor:
        split: Tensor = columns_DI.unflatten(1, (num_shared, -1))
        return split.transpose(0, 1)

    return Experts(
        gate_up=_stacked(gate_up_X2ID, shared_gate_up, up_parts), down=_stacked(down_XDI, shared_down, down_parts),
        num_shared=num_shared,
    )


def _stacked(routed: Weight, shared: Weight, parts: Callable[[Tensor], Tensor]) -> Weight:
    """The routed experts' weights, then the shared one's in parts; of FP8, numbers and scales alike."""
    if isinstance(routed, Tensor) and isinstance(shared, Tensor):
        return torch.cat([routed, parts(shared)])
    assert isinstance(routed, Fp8Matrix) and isinstance(shared, Fp8Matrix), "all experts are FP8, or none"
    codes = [part.view(torch.uint8) for part in (routed.codes_MK, parts(shared.codes_MK))]
    return Fp8Matrix(
        codes_MK=torch.cat(codes).view(torch.float8_e4m3fn),
        scales_Mg=torch.cat([routed.scales_Mg, parts(shared.scales_Mg)]),
    )


@triton.jit(do_not_specialize=["num_rows"])
def gate_up_kernel(x_ptr, w_ptr, act_ptr, x_scale_ptr, w_scale_ptr, order_ptr, counts_ptr, num_rows, width, num_in,
                   SCALES: tl.constexpr, RANKS: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr,
                   BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """silu(gate x) · up x of a tile of rows, rounded to the dtype of x. NUM_EXPERTS 0: dense, rows in order."""
    first, end = tl.program_id(1) * BLOCK_T, num_rows
    num_blocks = tl.cdiv(num_in, 128)
    if NUM_EXPERTS > 0:
        expert, first, end = find_tile(counts_ptr, tl.program_id(1), NUM_EXPERTS, BLOCK_X, BLOCK_T)
        w_ptr += expert.to(tl.int64) * 2 * width * num_in
        if SCALES == SCALED_BLOCKS:
            w_scale_ptr += expert * 2 * (width // 128) * num_blocks
        elif SCALES == SCALED_ROWS:
            w_scale_ptr += expert.to(tl.int64) * 2 * width * num_blocks
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_T)
    token = tl.minimum(row, end - 1)  # rows beyond the end repeat the last one; they are not stored
    if NUM_EXPERTS > 0:
        token = tl.load(order_ptr + token) // RANKS
    m, k = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    column = tl.minimum(m, width - 1)
    x = x_ptr + token.to(tl.int64)[:, None] * num_in + k[None, :]
    gate_w = w_ptr + column.to(tl.int64)[None, :] * num_in + k[:, None]
    up_w = gate_w + width.to(tl.int64) * num_in
    gate = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for k0 in range(0, num_in, BLOCK_K):
        if EVEN:
            xs, gates, ups = tl.load(x + k0), tl.load(gate_w + k0), tl.load(up_w + k0)
        else:
            xs = tl.load(x + k0, mask=(k0 + k < num_in)[None, :], other=0.0)
            gates = tl.load(gate_w + k0, mask=(k0 + k < num_in)[:, None], other=0.0)
            ups = tl.load(up_w + k0, mask=(k0 + k < num_in)[:, None], other=0.0)
        if SCALES == SCALED_BLOCKS:
            x_scale = tl.load(x_scale_ptr + token * num_blocks + k0 // 128)[:, None]
            gate_scale = w_scale_ptr + column // 128 * num_blocks + k0 // 128
            gate += tl.dot(xs, gates) * x_scale * tl.load(gate_scale)[None, :]
            up += tl.dot(xs, ups) * x_scale * tl.load(gate_scale + width // 128 * num_blocks)[None, :]
        elif SCALES == SCALED_ROWS:
            gate_scale = w_scale_ptr + column * num_blocks + k0 // 128
            gate += tl.dot(xs, gates.to(xs.dtype), input_precision="tf32x3") * tl.load(gate_scale)[None, :]
            up_scale = tl.load(gate_scale + width * num_blocks)[None, :]
            up += tl.dot(xs, ups.to(xs.dtype), input_precision="tf32x3") * up_scale
        else:
            gate = tl.dot(xs, gates, gate, input_precision="tf32x3")
            up = tl.dot(xs, ups, up, input_precision="tf32x3")
    act = (silu(gate) * up).to(act_ptr.dtype.element_ty)
    at = act_ptr + row.to(tl.int64)[:, None] * width + m[None, :]
    tl.store(at, act, mask=(row < end)[:, None] & (m < width)[None, :])


@triton.jit
def down_kernel(act_ptr, w_ptr, out_ptr, act_scale_ptr, w_scale_ptr, order_ptr, counts_ptr, width, num_out,
                SCALES: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_T: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """down(act) of a tile of sorted rows, float32, each to its pair's place."""
    expert, first, end = find_tile(counts_ptr, tl.program_id(1), NUM_EXPERTS, BLOCK_X, BLOCK_T)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_T)
    m, k = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    rows, columns = tl.minimum(row, end - 1).to(tl.int64), tl.minimum(m, num_out - 1).to(tl.int64)
    act = act_ptr + rows[:, None] * width + k[None, :]
    w = w_ptr + expert.to(tl.int64) * num_out * width + columns[None, :] * width + k[:, None]
    num_blocks = tl.cdiv(width, 128)
    act_scale = act_scale_ptr + rows * num_blocks if SCALES == SCALED_BLOCKS else act_scale_ptr
    if SCALES == SCALED_BLOCKS:
        w_scale_ptr += expert * tl.cdiv(num_out, 128) * num_blocks
    elif SCALES == SCALED_ROWS:
        w_scale_ptr += expert.to(tl.int64) * num_out * num_blocks
    w_scale = scales_of(w_scale_ptr, columns, width, SCALES)
    acc = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    acc = add_products(acc, act, w, act_scale, w_scale, 0, width, k, SCALES, EVEN)
    pair = tl.load(order_ptr + row, mask=row < end, other=0).to(tl.int64)
    at = out_ptr + pair[:, None] * num_out + m[None, :]
    tl.store(at, acc, mask=(row < end)[:, None] & (m < num_out)[None, :])


def moe_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, experts: Experts, *,
                shared_scale: float = 1.0) -> Tensor:
    """y_TD = ((w_0 E_0(x) + w_1 E_1(x)) + ...) + shared_scale · Shared(x): fp32 in rank order, rounded once."""
    assert weights_TK.is_contiguous() and experts_TK.is_contiguous(), (weights_TK.stride(), experts_TK.stride())
    y_TD = torch.empty_like(x_TD)
    if x_TD.shape[0] == 0:
        return y_TD
    num_experts, num_in, width = _parts(experts.down)[0].shape
    pairs = sort_by_expert(experts_TK, num_experts - experts.num_shared, experts.num_shared)
    act_PI = x_TD.new_empty(pairs.order_P.shape[0], width)
    gate_up(x_TD, experts.gate_up, act_PI, pairs)
    out_PD = torch.empty(pairs.order_P.shape[0], num_in, dtype=torch.float32, device=x_TD.device)
    down(act_PI, experts.down, out_PD, pairs)
    add_ranks(out_PD, weights_TK, y_TD, pairs.num_ranks, shared_scale)
    return y_TD


def swiglu(x_TD: Tensor, gate_up_2ID: Weight | Fp8Weight, down_DI: Weight | Fp8Weight) -> Tensor:
    """The dense MLP; the product of gate and up is rounded to the dtype of x."""
    act_TI = x_TD.new_empty(x_TD.shape[0], _parts(down_DI)[0].shape[1])
    if x_TD.shape[0]:
        gate_up(x_TD, gate_up_2ID, act_TI, None)
    return fp8_linear(act_TI, down_DI) if isinstance(down_DI, Fp8Weight) else linear(act_TI, down_DI)


def gate_up(x_TD: Tensor, weight: Weight | Fp8Weight, act_PI: Tensor, pairs: Pairs | None) -> None:
    """act = silu(gate x) · up x: a row a sorted pair; without pairs a row a token, and one expert's weight."""
    (w, w_scale), (num_rows, width), num_in = _parts(weight), act_PI.shape, x_TD.shape[1]
    assert x_TD.is_contiguous() and w.is_contiguous(), (x_TD.stride(), w.stride())
    x, x_scale = _quantized(x_TD, weight)
    assert x_scale is None or width % GROUP_FP8 == 0, f"W8A8 experts must be a multiple of 128 wide, got {width}"
    num_experts = 0 if pairs is None else w.shape[0]
    tiles = UP_TILES_MIXED if isinstance(weight, Fp8Matrix) and x.dtype != torch.float32 else UP_TILES[x.dtype]
    tile = _choose(num_rows, max(1, num_experts), tiles)
    gate_up_kernel[triton.cdiv(width, tile.block_m), num_tiles(num_rows, pairs, tile.block_t)](
        x, w, act_PI, x_scale, w_scale, pairs and pairs.order_P, pairs and pairs.counts_X, num_rows, width, num_in,
        SCALES=scales_kind(x_scale, w_scale), RANKS=1 if pairs is None else pairs.num_ranks, NUM_EXPERTS=num_experts,
        BLOCK_X=triton.next_power_of_2(max(1, num_experts)), BLOCK_T=tile.block_t, BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k, EVEN=num_in % tile.block_k == 0, num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


def down(act_PI: Tensor, weight: Weight | Fp8Weight, out_PD: Tensor, pairs: Pairs) -> None:
    """out[pair] = down(act of the pair), float32."""
    (w, w_scale), (act, act_scale) = _parts(weight), _quantized(act_PI, weight)
    num_experts, num_out, width = w.shape
    tiles = DOWN_TILES_MIXED if isinstance(weight, Fp8Matrix) and act.dtype != torch.float32 else DOWN_TILES[act.dtype]
    tile = _choose(act.shape[0], num_experts, tiles)
    down_kernel[triton.cdiv(num_out, tile.block_m), num_tiles(act.shape[0], pairs, tile.block_t)](
        act, w, out_PD, act_scale, w_scale, pairs.order_P, pairs.counts_X, width, num_out,
        SCALES=scales_kind(act_scale, w_scale), NUM_EXPERTS=num_experts, BLOCK_X=triton.next_power_of_2(num_experts),
        BLOCK_T=tile.block_t, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k, EVEN=width % tile.block_k == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )


def _parts(weight: Weight | Fp8Weight) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, Fp8Matrix):
        return weight.codes_MK, weight.scales_Mg
    return (weight.weight_MK, weight.scale_mk) if isinstance(weight, Fp8Weight) else (weight, None)


def _quantized(x_TK: Tensor, weight: Weight | Fp8Weight) -> tuple[Tensor, Tensor | None]:
    return fp8_quant(x_TK, weight.power_of_two) if isinstance(weight, Fp8Weight) else (x_TK, None)


def _choose(num_rows: int, num_experts: int, tiles: tuple[Tile, Tile]) -> Tile:
    """The tile of a product; it does not change the bits of a row."""
    small, large = tiles
    return small if num_rows <= MAX_ROWS_SMALL * num_experts else large
