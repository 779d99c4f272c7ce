"""Checksums of pieces in device memory: one program a piece, keys from a table."""

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_kernels.block_checksum import reference

BLOCK = reference.NUM_KEYS  # a lane for each key
RATIO = tl.constexpr(reference.RATIO)
LENGTH_KEY = tl.constexpr(reference.LENGTH_KEY - (1 << 64))  # as int64: only the lower 64 bits count
MIX_0 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX_1 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def shift_right(x, count: tl.constexpr):
    """Of the bits of an int64, zeros coming in."""
    return (x >> count) & ((1 << (64 - count)) - 1)


@triton.jit
def checksum_kernel(words_ptr, octets_ptr, keys_ptr, offsets_ptr, lengths_ptr, out_ptr, BLOCK: tl.constexpr):
    """One piece. Offsets and lengths are in bytes, offsets multiples of 4."""
    piece = tl.program_id(0)
    offset, length = tl.load(offsets_ptr + piece), tl.load(lengths_ptr + piece)
    words = words_ptr + offset // 4
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.int64)
    factor = tl.full([], 1, tl.int64)
    for first in range(0, length // 4, BLOCK):
        word = tl.load(words + first + lane, mask=first + lane < length // 4, other=0).to(tl.int64) & 0xFFFFFFFF
        sums += word * factor
        factor = tl.where(first + BLOCK <= length // 4, factor * RATIO, factor)
    rest = tl.arange(0, 4)  # bytes of a last, incomplete word
    octet = tl.load(octets_ptr + offset + length // 4 * 4 + rest, mask=rest < length % 4, other=0).to(tl.int64)
    tail = tl.sum(octet << (8 * rest), 0) * factor * tl.load(keys_ptr + length // 4 % BLOCK)
    x = tl.sum(sums * tl.load(keys_ptr + lane), 0) + tail + length * LENGTH_KEY
    x = (x ^ shift_right(x, 30)) * MIX_0
    x = (x ^ shift_right(x, 27)) * MIX_1
    tl.store(out_ptr + piece, x ^ shift_right(x, 31))


@functools.cache
def _keys(device: torch.device) -> Tensor:
    return torch.from_numpy(reference.keys().view(np.int64)).to(device)


def piece_checksums(memory: Tensor, offsets_n: Tensor, lengths_n: Tensor) -> Tensor:
    """One checksum a piece of `memory`: int64 [n], the bits of the uint64 that the reference gives.

    Args:
        memory: uint8, contiguous, its size a multiple of 4.
        offsets_n, lengths_n: int64 on the same device, in bytes; offsets are multiples of 4.
    """
    assert memory.dtype == torch.uint8 and memory.is_contiguous() and memory.numel() % 4 == 0, memory.shape
    out_n = torch.empty(offsets_n.shape[0], dtype=torch.int64, device=memory.device)
    if out_n.numel():
        checksum_kernel[(out_n.numel(),)](
            memory.view(torch.int32), memory, _keys(memory.device), offsets_n, lengths_n, out_n, BLOCK=BLOCK,
            num_warps=8)
    return out_n
