"""Attention with keys and values expanded a head from the latents, on a GPU: the cheaper form for long prompts.

1. The latents of the sequences' blocks are gathered: [S, P, C + R], P the slots that a block table spans.
2. Keys and values of all heads are products with both halves of kv_b_proj, rounded to the storage dtype.
3. A program attends a tile of consecutive rows, for one head, over tiles of keys at fixed absolute positions, in
   order. A tile of keys that a row may not see leaves the row's sums as they are, bit for bit, so a row does not
   depend on the rows it shares a tile with.

A value that is not finite is stored as a finite number in step 2: its key is not finite either, so that the rows that
see it still get NaN from their scores, while for the others 0 · NaN would not be 0. (Of values beyond the range of fp16
this makes the largest number of fp16.)
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.absorb.triton import AbsorbedWeight
from pd_kernels.latent_fp8 import reference as latent_fp8
from pd_kernels.linear.triton import linear
from pd_kernels.mla_attention.triton import LOWEST
from pd_kernels.ops import Rows
from pd_kernels.rope.triton import rotate_heads

BLOCK_Q = 128
TILE = 128
FLOAT32_BLOCKS = (32, 32)


@triton.jit(do_not_specialize=["num_rows", "num_positions", "first_position"])
def expanded_kernel(q_ptr, keys_ptr, values_ptr, rope_keys_ptr, positions_ptr, sequences_ptr, out_ptr, scale,
                    first_position, num_rows, num_heads, num_positions, rope_stride, N: tl.constexpr,
                    R: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
                    BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr):
    """A tile of rows, one head. Rows of a sequence are consecutive; the tile may hold several sequences."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=-1)
    sequence = tl.load(sequences_ptr + row, mask=row < num_rows, other=-1)
    n, r, v = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    q = q_ptr + (tl.minimum(row, num_rows - 1).to(tl.int64) * num_heads + head)[:, None] * (N + R)
    q_n = tl.load(q + n[None, :], mask=n[None, :] < N, other=0.0)
    q_r = tl.load(q + N + r[None, :], mask=r[None, :] < R, other=0.0)
    m = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    first = tl.min(tl.where(sequence >= 0, sequence, tl.max(sequence, 0)), 0)
    for current in range(first, tl.max(sequence, 0) + 1):
        last = tl.max(tl.where(sequence == current, position, -1), 0)
        base = num_positions.to(tl.int64) * current
        for start in range(0, last + 1, TILE):
            key = start + tl.arange(0, TILE)
            at = base + key
            loaded = (key <= last) & (key >= first_position)
            k_n = tl.load(keys_ptr + (at * num_heads + head)[:, None] * N + n[None, :],
                          mask=loaded[:, None] & (n[None, :] < N), other=0.0)
            k_r = tl.load(rope_keys_ptr + at[:, None] * rope_stride + r[None, :],
                          mask=loaded[:, None] & (r[None, :] < R), other=0.0)
            value = tl.load(values_ptr + (at * num_heads + head)[:, None] * V + v[None, :],
                            mask=loaded[:, None] & (v[None, :] < V), other=0.0)
            s = tl.dot(q_n, tl.trans(k_n), input_precision="tf32x3")
            s = tl.dot(q_r, tl.trans(k_r), s, input_precision="tf32x3")
            visible = (sequence == current)[:, None] & (key[None, :] <= position[:, None])
            s = tl.where(visible & (key >= first_position)[None, :], s * scale, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            total = total * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision="tf32x3")
            m = m_new
    out = tl.div_rn(acc, tl.where(total == 0.0, 1.0, total)[:, None])
    target = out_ptr + (row.to(tl.int64) * num_heads + head)[:, None] * V + v[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & (v < V)[None, :])


def mla_attention_expanded(q_TF: Tensor, weight: AbsorbedWeight, rope_P2R: Tensor, cache_GKE: Tensor, rows: Rows,
                           scale: float, first_position: int) -> Tensor:
    """[T, H·V] in the dtype of q. Rows of a sequence must be consecutive, and sequences in ascending order."""
    num_heads, nope_width, latent_width = weight.w_uk_HNC.shape
    value_width, num_rows = weight.w_uv_HVC.shape[1], q_TF.shape[0]
    q_THF = q_TF.unflatten(1, (num_heads, -1))
    rotated = q_THF.contiguous().clone()
    rotate_heads(q_THF, rope_P2R, rows.positions_T, rotated)
    latents = _gather(cache_GKE, rows.block_tables_SB, latent_width)
    keys = linear(latents[:, :latent_width], weight.w_uk_HNC.flatten(0, 1))
    values = linear(latents[:, :latent_width], weight.w_uv_HVC.flatten(0, 1)).nan_to_num_()
    out_THV = q_TF.new_empty(num_rows, num_heads, value_width)
    rope_width = q_THF.shape[-1] - nope_width
    block_q, tile = FLOAT32_BLOCKS if q_TF.dtype == torch.float32 else (BLOCK_Q, TILE)
    if num_rows:
        expanded_kernel[triton.cdiv(num_rows, block_q), num_heads](
            rotated, keys, values, latents[:, latent_width:], rows.positions_T, rows.sequence_T, out_THV,
            scale * math.log2(math.e), first_position, num_rows, num_heads,
            rows.block_tables_SB.shape[1] * cache_GKE.shape[1], latents.stride(0), N=nope_width, R=rope_width,
            V=value_width, BLOCK_N=_block(nope_width), BLOCK_R=_block(rope_width), BLOCK_V=_block(value_width),
            BLOCK_Q=block_q, TILE=tile, num_warps=8, num_stages=2, enable_fp_fusion=False,
        )
    return out_THV.flatten(1)


def _block(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


def _gather(cache_GKE: Tensor, tables_SB: Tensor, latent_width: int) -> Tensor:
    """Latents [S·P, C + R] of all slots that the tables name; where they name none, those of some block."""
    slots = cache_GKE[tables_SB.clamp(min=0).flatten()].flatten(0, 1)
    return latent_fp8.decode(slots, latent_width) if cache_GKE.dtype == torch.uint8 else slots
