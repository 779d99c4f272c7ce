"""Absorbed attention over the paged latent cache on a GPU: decoding, verification and prompts in one kernel.

The context is cut at fixed absolute positions, twice: into tiles of `TILE` keys, reduced in order with an online
softmax, and into splits of `SPLIT` keys, which programs of their own reduce and a second kernel combines in order.
A program has up to 64 heads of one row, whose scores and sums never mix, so a row's bits depend on its own position
only: a prompt's row, a decoded one and one of several that are verified are computed alike. A row within the first
split is written by its program directly, with the bits that combining one split would give.

The weights p of a tile are rounded to the cache's dtype before they multiply the latents, as the matrix units want
it; that is the one rounding that the reference does not have (pd_kernels.triton_tolerances).
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.latent_fp8 import triton as fp8
from pd_kernels.ops import ATTENTION_TILE, Rows

SPLIT = 1024
MAX_PARTIAL_BYTES = 1 << 29  # splits' results held at a time; rows beyond are computed in a further pass
MAX_ROWS = 65_535  # of a launch: the limit of a grid's second and third dimension
LOWEST = tl.constexpr(-1e30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    block_h: int
    keys: int
    num_warps: int
    num_stages: int


TILE_16_BIT = Tile(block_h=64, keys=ATTENTION_TILE, num_warps=8, num_stages=3)
TILES = {  # by the dtype of the cache
    torch.bfloat16: TILE_16_BIT,
    torch.float16: TILE_16_BIT,
    torch.uint8: Tile(block_h=64, keys=ATTENTION_TILE, num_warps=8, num_stages=2),
    torch.float32: Tile(block_h=16, keys=ATTENTION_TILE // 2, num_warps=4, num_stages=2),
}


@triton.jit(do_not_specialize=["table_width", "num_splits", "first_position"])
def split_kernel(q_ptr, c_ptr, scale_ptr, k_ptr, positions_ptr, sequences_ptr, tables_ptr, out_ptr, partial_ptr,
                 sums_ptr, scale, first_position, num_heads, table_width, num_splits, c_stride, scale_stride, k_stride,
                 SLOTS: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_H: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr):
    """One split of one row's context, for a block of heads. `scale` is the softmax scale times log2 e.

    `c_ptr`, `scale_ptr` and `k_ptr` are views of the same cache, with strides of a slot in their own numbers.
    """
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    position = tl.load(positions_ptr + row)
    if split * SPLIT > position:
        return
    table = tables_ptr + tl.load(sequences_ptr + row).to(tl.int64) * table_width
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    column, pair = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    q = q_ptr + (row * num_heads + tl.minimum(head, num_heads - 1))[:, None] * (C + R)
    q_c = tl.load(q + column[None, :], mask=column[None, :] < C, other=0.0)
    q_k = tl.load(q + C + pair[None, :], mask=pair[None, :] < R, other=0.0)
    m = tl.full([BLOCK_H], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, position + 1), TILE):
        key = start + tl.arange(0, TILE)
        visible = (key <= position) & (key >= first_position)
        block = tl.load(table + key // SLOTS, mask=visible, other=0)
        slot = block.to(tl.int64) * SLOTS + key % SLOTS
        c = tl.load(c_ptr + slot[:, None] * c_stride + column[None, :],
                    mask=visible[:, None] & (column[None, :] < C), other=0.0)
        k = tl.load(k_ptr + slot[:, None] * k_stride + pair[None, :],
                    mask=visible[:, None] & (pair[None, :] < R), other=0.0)
        if FP8:
            group = tl.arange(0, BLOCK_C // fp8.GROUP)
            scales = scale_ptr + slot[:, None] * scale_stride + group[None, :]
            scales = tl.load(scales, mask=visible[:, None], other=0.0)
            wide = tl.reshape(c.to(tl.float32), [TILE, BLOCK_C // fp8.GROUP, fp8.GROUP]) * scales[:, :, None]
            c = tl.reshape(wide, [TILE, BLOCK_C]).to(tl.bfloat16)
        s = tl.dot(q_c, tl.trans(c), input_precision="tf32x3")
        s = tl.dot(q_k, tl.trans(k), s, input_precision="tf32x3")
        s = tl.where(visible[None, :], s * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc * alpha[:, None], input_precision="tf32x3")
        m = m_new
    stored = (head[:, None] < num_heads) & (column[None, :] < C)
    if position < SPLIT:
        out = out_ptr + (row * num_heads + head)[:, None] * C + column[None, :]
        tl.store(out, tl.div_rn(acc, _nonzero(total)[:, None]).to(out_ptr.dtype.element_ty), mask=stored)
    else:
        at = (row * num_splits + split) * num_heads + head
        tl.store(partial_ptr + at[:, None] * C + column[None, :], acc, mask=stored)
        tl.store(sums_ptr + at * 2, m, mask=head < num_heads)
        tl.store(sums_ptr + at * 2 + 1, total, mask=head < num_heads)


@triton.jit
def _nonzero(total):
    """A row that sees nothing has a sum of 0, and gives zeros."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(partial_ptr, sums_ptr, positions_ptr, out_ptr, num_heads, num_splits, C: tl.constexpr,
                   BLOCK_C: tl.constexpr, SPLIT: tl.constexpr):
    """The splits of one row and head, in order."""
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    position = tl.load(positions_ptr + row)
    if position < SPLIT:
        return
    column = tl.arange(0, BLOCK_C)
    at = row * num_splits * num_heads + head
    acc = tl.load(partial_ptr + at * C + column, mask=column < C, other=0.0)
    m = tl.load(sums_ptr + at * 2)
    total = tl.load(sums_ptr + at * 2 + 1)
    for _ in range(0, position // SPLIT):
        at += num_heads
        part = tl.load(partial_ptr + at * C + column, mask=column < C, other=0.0)
        part_m = tl.load(sums_ptr + at * 2)
        m_new = tl.maximum(m, part_m)
        alpha = tl.exp2(m - m_new)
        beta = tl.exp2(part_m - m_new)
        total = total * alpha + tl.load(sums_ptr + at * 2 + 1) * beta
        acc = acc * alpha + part * beta
        m = m_new
    out = tl.div_rn(acc, _nonzero(total)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * num_heads + head) * C + column, out, mask=column < C)


def mla_attention(q_THE: Tensor, cache_GKE: Tensor, rows: Rows, scale: float, first_position: int,
                  latent_width: int, split: int = SPLIT) -> Tensor:
    """o_THC in the dtype of q. A uint8 cache holds FP8 slots (pd_kernels.latent_fp8.reference), for bf16 queries."""
    num_rows, num_heads, _ = q_THE.shape
    is_fp8 = cache_GKE.dtype == torch.uint8
    assert q_THE.is_contiguous() and q_THE.dtype == (torch.bfloat16 if is_fp8 else cache_GKE.dtype), q_THE.dtype
    assert cache_GKE.is_contiguous() and rows.block_tables_SB.is_contiguous(), rows.block_tables_SB.stride()
    out_THC = q_THE.new_empty(num_rows, num_heads, latent_width)
    max_context = rows.block_tables_SB.shape[1] * cache_GKE.shape[1]
    num_splits = max(1, triton.cdiv(max_context, split))
    row_bytes = 4 * num_splits * num_heads * (latent_width + 2) if num_splits > 1 else 0
    step = max(1, min(MAX_ROWS, MAX_PARTIAL_BYTES // max(1, row_bytes)))
    partial = torch.empty(min(step, num_rows) * row_bytes // 4, dtype=torch.float32, device=q_THE.device)
    for start in range(0, num_rows, step):
        part = slice(start, start + step)
        _attend(q_THE[part], cache_GKE, rows.positions_T[part], rows.sequence_T[part], rows.block_tables_SB,
                out_THC[part], partial, scale * math.log2(math.e), first_position, num_splits, split)
    return out_THC


def _attend(q_THE: Tensor, cache_GKE: Tensor, positions_T: Tensor, sequence_T: Tensor, tables_SB: Tensor,
            out_THC: Tensor, partial: Tensor, scale: float, first_position: int, num_splits: int, split: int) -> None:
    """Some rows. `partial` has room for their splits: [T, splits, H, C] and then [T, splits, H, 2]."""
    (num_rows, num_heads, width), latent_width = q_THE.shape, out_THC.shape[2]
    rope_width, is_fp8 = width - latent_width, cache_GKE.dtype == torch.uint8
    c, scales, k = fp8.views(cache_GKE) if is_fp8 else (cache_GKE, cache_GKE, cache_GKE)
    sums = partial[num_rows * num_splits * num_heads * latent_width :]
    block_c, tile = triton.next_power_of_2(latent_width), TILES[cache_GKE.dtype]
    split_kernel[triton.cdiv(num_heads, tile.block_h), num_rows, num_splits](
        q_THE, c, scales[..., latent_width // 4 :], k[..., k.shape[-1] - rope_width :], positions_T, sequence_T,
        tables_SB, out_THC, partial, sums, scale, first_position, num_heads, tables_SB.shape[1], num_splits,
        c.shape[-1], scales.shape[-1], k.shape[-1], SLOTS=cache_GKE.shape[1], C=latent_width, R=rope_width,
        BLOCK_C=max(16, block_c), BLOCK_R=max(16, triton.next_power_of_2(rope_width)), BLOCK_H=tile.block_h,
        TILE=tile.keys, SPLIT=split, FP8=is_fp8, num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    if num_splits > 1:
        combine_kernel[num_heads, num_rows](
            partial, sums, positions_T, out_THC, num_heads, num_splits, C=latent_width, BLOCK_C=block_c, SPLIT=split,
            num_warps=1 if block_c <= 128 else 4, enable_fp_fusion=False,
        )
