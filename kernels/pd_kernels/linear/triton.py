"""y = x W^T on a GPU, alone or a head, with rows that do not depend on how many there are; bf16, float32 and FP8.

FP8 weights are multiplied with activations as they are (fp8_matrix), or with activations in FP8 (fp8_gemm). Every e4m3
number is a bf16 number, so the former products are exact too. In both forms a block of 128 channels is summed from
zero, then scaled and added in float32.

The sum over K is cut into chunks whose width depends on the shape of the weight alone. Within a chunk the matrix
units add in order of K from zero; the chunks are added in order. A small batch computes the chunks in parallel and
adds them in a second kernel, a large one computes them one after the other: the same additions. Tiles differ between
the two, but each is a stack of the same instruction's 64 rows, so a row's bits do not depend on its tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.fp8_matrix import Fp8Matrix, Weight

NUM_PROGRAMS_WANTED = 160  # a few more than a Hopper GPU has multiprocessors (132)
MAX_CHUNKS = 16
MIN_CHUNK = 512
MAX_ROWS_ALONE = 128  # rows up to which a weight that is not chunked takes small tiles
MAX_ROWS_CHUNKED = 512  # the same for a chunked weight
GROUP = 8  # row tiles that share weights in the L2 cache
BLOCK_SUM = 1024
GROUP_FP8 = 128  # channels, and columns, that share a scale
UNSCALED, SCALED_ROWS, SCALED_BLOCKS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a kernel is told of its weight: plain; FP8 with a scale a row and 128 channels (`Fp8Matrix`), beside activations
as they are; FP8 with a scale a block of 128 x 128 (`Fp8Weight`), beside activations in FP8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    block_t: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


SMALL = Tile(block_t=64, block_m=128, block_k=64, num_warps=4, num_stages=4)
LARGE = Tile(block_t=128, block_m=256, block_k=64, num_warps=8, num_stages=3)
MIDDLE = Tile(block_t=128, block_m=128, block_k=64, num_warps=8, num_stages=4)
FLOAT32 = Tile(block_t=64, block_m=64, block_k=32, num_warps=4, num_stages=3)
FP8_SMALL = Tile(block_t=64, block_m=128, block_k=GROUP_FP8, num_warps=4, num_stages=4)
FP8_LARGE = Tile(block_t=128, block_m=128, block_k=GROUP_FP8, num_warps=8, num_stages=4)
FP8_LARGE_CHUNKED = Tile(block_t=128, block_m=64, block_k=GROUP_FP8, num_warps=8, num_stages=4)
MIXED_SMALL = Tile(block_t=64, block_m=128, block_k=GROUP_FP8, num_warps=4, num_stages=3)
MIXED_LARGE = Tile(block_t=128, block_m=128, block_k=GROUP_FP8, num_warps=8, num_stages=3)
MIXED_LARGE_CHUNKED = Tile(block_t=128, block_m=64, block_k=GROUP_FP8, num_warps=8, num_stages=3)
IN_ORDER = (  # tiles that add the chunks themselves
    LARGE, MIDDLE, FP8_LARGE, FP8_LARGE_CHUNKED, MIXED_LARGE, MIXED_LARGE_CHUNKED,
)


def chunk_width(num_out: int, num_in: int, num_heads: int) -> int:
    """Of the parts that the sum over K is cut into: a multiple of 128, or all of K."""
    num_tiles = -(-num_out // SMALL.block_m) * num_heads
    num_chunks = min(MAX_CHUNKS, -(-NUM_PROGRAMS_WANTED // num_tiles), max(1, num_in // MIN_CHUNK))
    width = -(-num_in // num_chunks)
    return num_in if num_chunks == 1 else -(-width // GROUP_FP8) * GROUP_FP8


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(x_ptr, w_ptr, y_ptr, x_scale_ptr, w_scale_ptr, num_rows, num_out, num_in, width, x_row, x_head,
                  w_head, y_row, y_head, y_chunk, SCALES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_CHUNKS: tl.constexpr, EVEN: tl.constexpr):
    """A [BLOCK_T, BLOCK_M] tile of one head: one chunk of K (NUM_CHUNKS 0), or that many, added in order."""
    tile, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    num_t, num_m = tl.cdiv(num_rows, BLOCK_T), tl.cdiv(num_out, BLOCK_M)
    first = tile // (GROUP * num_m) * GROUP
    size = tl.minimum(num_t - first, GROUP)
    t = (first + tile % (GROUP * num_m) % size) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tile % (GROUP * num_m) // size * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the end repeat the last one; they are not stored.
    rows, columns = tl.minimum(t, num_rows - 1).to(tl.int64), tl.minimum(m, num_out - 1).to(tl.int64)
    x = x_ptr + head * x_head + rows[:, None] * x_row + k[None, :]
    w = w_ptr + head * w_head + columns[None, :] * num_in + k[:, None]
    x_scale = x_scale_ptr + rows * tl.cdiv(num_in, 128) if SCALES == SCALED_BLOCKS else x_scale_ptr
    w_scale = scales_of(w_scale_ptr, columns, num_in, SCALES)
    if NUM_CHUNKS == 0:
        start = tl.program_id(1) * width
        total = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        total = add_products(total, x, w, x_scale, w_scale, start, tl.minimum(start + width, num_in), k, SCALES, EVEN)
        y_ptr += tl.program_id(1).to(tl.int64) * y_chunk
    else:
        total = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        total = add_products(total, x, w, x_scale, w_scale, 0, tl.minimum(width, num_in), k, SCALES, EVEN)
        for chunk in range(1, NUM_CHUNKS):
            part = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
            end = tl.minimum((chunk + 1) * width, num_in)
            total += add_products(part, x, w, x_scale, w_scale, chunk * width, end, k, SCALES, EVEN)
    y = y_ptr + head * y_head + t.to(tl.int64)[:, None] * y_row + m[None, :]
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=(t[:, None] < num_rows) & (m[None, :] < num_out))


@triton.jit
def add_products(acc, x, w, x_scale, w_scale, start, end, k, SCALES: tl.constexpr, EVEN: tl.constexpr):
    """acc + Σ over start <= k < end of x W^T, in float32.

    Args:
        x, w: pointers to [T, K] and [K, M] at k = 0.
        x_scale, w_scale: pointers to the scales [T] and [M] of the first 128 channels, as far as SCALES says there are.
        EVEN: start and end are multiples of the block of K.
    """
    for k0 in range(start, end, k.shape[0]):
        if EVEN:
            xs, ws = tl.load(x + k0), tl.load(w + k0)
        else:
            xs = tl.load(x + k0, mask=(k0 + k < end)[None, :], other=0.0)
            ws = tl.load(w + k0, mask=(k0 + k < end)[:, None], other=0.0)
        if SCALES == UNSCALED:
            acc = tl.dot(xs, ws, acc, input_precision="tf32x3")
        else:
            part = tl.dot(xs, ws.to(xs.dtype), input_precision="tf32x3")
            if SCALES == SCALED_BLOCKS:
                part = part * tl.load(x_scale + k0 // 128)[:, None]
            acc += part * tl.load(w_scale + k0 // 128)[None, :]
    return acc


@triton.jit
def scales_of(w_scale_ptr, columns, num_in, SCALES: tl.constexpr):
    """Pointers to the scales of the weights of some columns, at the first 128 channels."""
    scale = w_scale_ptr
    if SCALES == SCALED_BLOCKS:
        scale += columns // 128 * tl.cdiv(num_in, 128)
    elif SCALES == SCALED_ROWS:
        scale += columns * tl.cdiv(num_in, 128)
    return scale


@triton.jit
def sum_chunks_kernel(partial_ptr, y_ptr, num_values, num_chunks, BLOCK: tl.constexpr):
    """The chunks' results, added in order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_values
    total = tl.load(partial_ptr + at, mask=mask, other=0.0)
    for _ in range(1, num_chunks):
        partial_ptr += num_values
        total += tl.load(partial_ptr + at, mask=mask, other=0.0)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def linear(x_TK: Tensor, weight_MK: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T, float32 inside, rounded once to `out_dtype` (the dtype of x by default)."""
    y_TM = x_TK.new_empty(x_TK.shape[0], weight_MK.shape[0], dtype=out_dtype or x_TK.dtype)
    weight, w_scale = (weight_MK.codes_MK, weight_MK.scales_Mg) if isinstance(weight_MK, Fp8Matrix) else (
        weight_MK, None)
    matmul(x_TK.unsqueeze(1), weight.unsqueeze(0), y_TM.unsqueeze(1), w_scale=w_scale)
    return y_TM


def matmul(x_THK: Tensor, weight_HMK: Tensor, y_THM: Tensor, x_scale: Tensor | None = None,
           w_scale: Tensor | None = None) -> None:
    """y_h = x_h W_h^T for each head h. x and y may be strided over T and H; the weight is contiguous.

    e4m3 of one head comes with its scales, float32: x's [T, blocks of K] and W's [blocks of M, blocks of K] (fp8_gemm),
    or W's alone, [M, blocks of K] (fp8_matrix).
    """
    (num_rows, num_heads, num_in), num_out = x_THK.shape, weight_HMK.shape[1]
    is_mixed = w_scale is not None and x_scale is None
    assert weight_HMK.dtype == (torch.float8_e4m3fn if is_mixed else x_THK.dtype), (weight_HMK.dtype, x_THK.dtype)
    assert weight_HMK.is_contiguous() and (w_scale is None or w_scale.is_contiguous()), weight_HMK.stride()
    assert x_THK.stride(2) == 1 and y_THM.stride(2) == 1, (x_THK.stride(), y_THM.stride())
    if num_rows == 0:
        return
    width = chunk_width(num_out, num_in, num_heads)
    num_chunks = -(-num_in // width)
    tile = choose_tile(num_rows, num_out, num_chunks, x_THK.dtype, is_mixed=is_mixed)
    parallel = num_chunks > 1 and tile not in IN_ORDER
    out = y_THM if not parallel else torch.empty(
        num_chunks, num_rows, num_heads, num_out, dtype=torch.float32, device=x_THK.device)
    num_tiles = triton.cdiv(num_rows, tile.block_t) * triton.cdiv(num_out, tile.block_m)
    matmul_kernel[num_tiles, num_chunks if parallel else 1, num_heads](
        x_THK, weight_HMK, out, x_scale, w_scale, num_rows, num_out, num_in, width, x_THK.stride(0), x_THK.stride(1),
        weight_HMK.stride(0), out.stride(-3), out.stride(-2), out.stride(0) if parallel else 0,
        SCALES=scales_kind(x_scale, w_scale), BLOCK_T=tile.block_t, BLOCK_M=tile.block_m, BLOCK_K=tile.block_k,
        GROUP=GROUP, NUM_CHUNKS=0 if parallel else num_chunks, EVEN=num_in % tile.block_k == 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )
    if parallel:
        assert y_THM.is_contiguous(), y_THM.stride()
        sum_chunks_kernel[(triton.cdiv(y_THM.numel(), BLOCK_SUM),)](
            out, y_THM, y_THM.numel(), num_chunks, BLOCK=BLOCK_SUM, num_warps=4)


def scales_kind(x_scale: Tensor | None, w_scale: Tensor | None) -> int:
    """SCALES of a product with these scales."""
    if w_scale is None:
        return int(UNSCALED.value)
    return int((SCALED_ROWS if x_scale is None else SCALED_BLOCKS).value)


def choose_tile(num_rows: int, num_out: int, num_chunks: int, dtype: torch.dtype, *, is_mixed: bool = False) -> Tile:
    """The tile of a product; it does not change the bits of a row.

    Args:
        dtype: of x.
        is_mixed: the weight is FP8 and x is not.
    """
    if dtype == torch.float32:
        return FLOAT32
    is_fp8 = dtype == torch.float8_e4m3fn
    if num_rows <= (MAX_ROWS_ALONE if num_chunks == 1 else MAX_ROWS_CHUNKED):
        return FP8_SMALL if is_fp8 else MIXED_SMALL if is_mixed else SMALL
    if is_mixed:
        return MIXED_LARGE if num_chunks == 1 else MIXED_LARGE_CHUNKED
    if is_fp8:
        return FP8_LARGE if num_chunks == 1 else FP8_LARGE_CHUNKED
    return LARGE if num_chunks == 1 and num_out > MIDDLE.block_m else MIDDLE
