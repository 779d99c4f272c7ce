"""Memory for what every step reads from end to end: weights, on pages of 2 MiB where the kernel gives them.

On ordinary pages a step waits for the address of a page every 64 cache lines, and the processor's own prefetching ends
at each of them.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

SLAB_BYTES = 1 << 26     # mapped at a time; pages are taken as they are first written
SMALL_BYTES = 1 << 16    # what is smaller stays where it is
ALIGNMENT = 64


class HugePages:
    """One set of weights. A slab is given back when the last tensor in it has gone."""

    def __init__(self) -> None:
        self._slab: mmap.mmap | None = None
        self._num_used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor: there, or as it is where there is no such memory."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < SMALL_BYTES:
            return tensor
        if self._slab is None or self._num_used + num_bytes > len(self._slab):
            self._slab, self._num_used = _mapped(max(SLAB_BYTES, num_bytes)), 0
        if self._slab is None:
            return tensor
        there = torch.frombuffer(self._slab, dtype=tensor.dtype, offset=self._num_used, count=tensor.numel())
        self._num_used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return there.view(tensor.shape).copy_(tensor)


def _mapped(num_bytes: int) -> mmap.mmap | None:
    try:
        slab = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        slab.madvise(mmap.MADV_HUGEPAGE)
    return slab
