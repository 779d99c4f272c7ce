"""Copying pieces between two buffers in device memory, or within one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
UNIT_BYTES = 8


@triton.jit(do_not_specialize=["num_units"])
def copy_kernel(source_ptr, target_ptr, source_offsets_ptr, target_offsets_ptr, lengths_ptr, num_units,
                UNIT_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """A stretch of one piece, in units of 8 bytes. `num_units` bounds the longest piece."""
    piece = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.minimum(tl.load(lengths_ptr + piece) // UNIT_BYTES, num_units)
    source = source_ptr + tl.load(source_offsets_ptr + piece) // UNIT_BYTES
    target = target_ptr + tl.load(target_offsets_ptr + piece) // UNIT_BYTES
    tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


def copy_pieces(source: Tensor, target: Tensor, source_offsets_n: Tensor, target_offsets_n: Tensor,
                lengths_n: Tensor, max_length: int) -> None:
    """target[target_offsets[i] ...] = source[source_offsets[i] ...], lengths[i] bytes long, for each i.

    Args:
        source, target: uint8, contiguous, their sizes multiples of 8. Pieces that are written must not overlap any
            other piece.
        source_offsets_n, target_offsets_n, lengths_n: int64 on the same device, in bytes, multiples of 8.
        max_length: no length is larger.
    """
    for memory in (source, target):
        assert memory.dtype == torch.uint8 and memory.is_contiguous() and memory.numel() % UNIT_BYTES == 0, memory.shape
    assert max_length % UNIT_BYTES == 0, max_length
    num_units = max_length // UNIT_BYTES
    if lengths_n.shape[0] and num_units:
        copy_kernel[lengths_n.shape[0], triton.cdiv(num_units, BLOCK)](
            source.view(torch.int64), target.view(torch.int64), source_offsets_n, target_offsets_n, lengths_n,
            num_units, UNIT_BYTES=UNIT_BYTES, BLOCK=BLOCK, num_warps=8)
