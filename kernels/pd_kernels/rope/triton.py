"""Rotary embedding of interleaved pairs, for use inside kernels, and of the rope part of every head."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate(a, b, cos, sin):
    """(even, odd) numbers of each pair, turned."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rotate_heads_kernel(q_ptr, rope_ptr, positions_ptr, out_ptr, num_heads, num_pairs, q_row, q_stride, q_start,
                        out_stride, out_start, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr):
    """The pairs of a block of heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_P)
    mask_P = pair < num_pairs
    mask_HP = (head[:, None] < num_heads) & mask_P[None, :]
    angle = rope_ptr + tl.load(positions_ptr + row).to(tl.int64) * 2 * num_pairs + pair
    cos = tl.load(angle, mask=mask_P, other=0.0)[None, :]
    sin = tl.load(angle + num_pairs, mask=mask_P, other=0.0)[None, :]
    source = q_ptr + row * q_row + head[:, None] * q_stride + q_start + 2 * pair[None, :]
    a = tl.load(source, mask=mask_HP, other=0.0).to(tl.float32)
    b = tl.load(source + 1, mask=mask_HP, other=0.0).to(tl.float32)
    a, b = rotate(a, b, cos, sin)
    target = out_ptr + (row * num_heads + head[:, None]) * out_stride + out_start + 2 * pair[None, :]
    tl.store(target, a.to(out_ptr.dtype.element_ty), mask=mask_HP)
    tl.store(target + 1, b.to(out_ptr.dtype.element_ty), mask=mask_HP)


def rotate_heads(q_THF: Tensor, rope_P2R: Tensor, positions_T: Tensor, out_THE: Tensor) -> None:
    """The last R numbers of each head of q, rotated and rounded once, into the last R numbers of each head of out.

    Args:
        q_THF: heads and rows may be strided.
        out_THE: contiguous.
        rope_P2R: [P, 2, R/2] float32, cosines then sines.
        positions_T: int32.
    """
    num_rows, num_heads, q_width = q_THF.shape
    out_width, num_pairs = out_THE.shape[-1], rope_P2R.shape[-1]
    assert q_THF.stride(2) == 1 and out_THE.is_contiguous(), (q_THF.stride(), out_THE.stride())
    if num_rows == 0:
        return
    block_h = min(16, triton.next_power_of_2(num_heads))
    rotate_heads_kernel[num_rows, triton.cdiv(num_heads, block_h)](
        q_THF, rope_P2R, positions_T, out_THE, num_heads, num_pairs, q_THF.stride(0), q_THF.stride(1),
        q_width - 2 * num_pairs, out_width, out_width - 2 * num_pairs, BLOCK_H=block_h,
        BLOCK_P=triton.next_power_of_2(num_pairs), num_warps=4, enable_fp_fusion=False,
    )
