"""Rows of the embedding table on a GPU."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def embed_kernel(ids_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """One program: one stretch of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    value = tl.load(table_ptr + token * width + column, mask=column < width)
    tl.store(out_ptr + row * width + column, value, mask=column < width)


def embed(ids_T: Tensor, table_ZD: Tensor) -> Tensor:
    """x_TD = table[ids], in the table's dtype."""
    num_rows, width = ids_T.shape[0], table_ZD.shape[1]
    out_TD = table_ZD.new_empty(num_rows, width)
    assert ids_T.is_contiguous() and table_ZD.is_contiguous(), (ids_T.stride(), table_ZD.stride())
    if num_rows:
        embed_kernel[num_rows, triton.cdiv(width, BLOCK)](ids_T, table_ZD, out_TD, width, BLOCK=BLOCK, num_warps=4)
    return out_TD
