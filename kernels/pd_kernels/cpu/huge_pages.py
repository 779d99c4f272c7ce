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
    """One set of weights. A slab is given back when the last tensor in it has gone, the last one not before this."""

    def __init__(self) -> None:
        self._slab: mmap.mmap | None = None
        self._num_used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor: there, or as it is where there is no such memory."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < SMALL_BYTES:
            return tensor
        if num_bytes > SLAB_BYTES:
            own = _mapped(num_bytes)
            return tensor if own is None else _copied(tensor, own, 0)
        if self._slab is None or self._num_used + num_bytes > SLAB_BYTES:
            self._slab, self._num_used = _mapped(SLAB_BYTES), 0
        if self._slab is None:
            return tensor
        offset = self._num_used
        self._num_used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return _copied(tensor, self._slab, offset)


def _copied(tensor: Tensor, slab: mmap.mmap, offset: int) -> Tensor:
    there = torch.frombuffer(slab, dtype=tensor.dtype, offset=offset, count=tensor.numel())
    return there.view(tensor.shape).copy_(tensor)


def _mapped(num_bytes: int) -> mmap.mmap | None:
    try:
        slab = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        slab.madvise(mmap.MADV_HUGEPAGE)
    return slab
