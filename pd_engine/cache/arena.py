"""The memory of a worker's blocks: one memfd, so that another process can map it and copy pieces out of it.

    header: uint64 generation of each block, padded to a page
    body:   component 0 [num_blocks, block_size, width], component 1, ..., each starting on a page

A generation only ever grows, by one with each new owner of the block. A reader that sees the same generation before
and after its copy has read one owner's bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_engine.cache.layout import CacheLayout

PAGE_BYTES = 4096
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not yet a name in Python's fcntl
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.uint8}


def component_offsets(layout: CacheLayout, num_blocks: int) -> tuple[list[int], int]:
    """(byte offset of each component, total bytes) of an arena: both sides of a handoff compute it alike."""
    offset = _round_up(num_blocks * 8)
    offsets = []
    for component in range(len(layout.components)):
        offsets.append(offset)
        offset = _round_up(offset + num_blocks * layout.piece_bytes(component))
    return offsets, offset


class Arena:
    """Blocks in shared memory. Pages are zero and take no room until they are first written.

    The memory file is sealed: it can neither shrink under a reader (whose access would then be fatal) nor be mapped
    writable a second time, so whoever is given `fd` can only read.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.offsets, self.num_bytes = component_offsets(layout, num_blocks)
        self.fd = os.memfd_create("pd-relay-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.num_bytes)
        self._map = mmap.mmap(self.fd, self.num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self.buffer = memoryview(self._map)  # all bytes, writable
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(self._map, dtype=np.uint64, count=num_blocks)
        self.components: list[Tensor] = [
            torch.frombuffer(
                self._map, dtype=TORCH_DTYPES[component.dtype], offset=offset,
                count=num_blocks * layout.block_size * component.width,
            ).view(num_blocks, layout.block_size, component.width)
            for component, offset in zip(layout.components, self.offsets, strict=True)
        ]

    @property
    def is_staged(self) -> bool:
        """Whether the components are elsewhere than in `buffer`, which then only holds what travels (`DeviceArena`)."""
        return False

    def expose(self, component: int, block_ids_N: Int64s, generations_N: UInt64s) -> None:
        """`buffer` has what is in these blocks of a component now; not of blocks whose generation is another one."""

    def take_in(self, component: int, block_ids_N: Int64s) -> None:
        """What a transport has written to these blocks in `buffer` is in the component."""

    def read_blocks(self, component: int, block_ids_N: Tensor, out: Tensor | None = None) -> Tensor:
        """What the blocks hold, in host memory [N, block_size, width]: into `out` if it is given."""
        return torch.index_select(self.components[component], 0, block_ids_N, out=out)

    def write_blocks(self, component: int, block_ids_N: Tensor, contents: Tensor) -> None:
        """The way back: `contents` [N, block_size, width] are in host memory."""
        self.components[component].index_copy_(0, block_ids_N, contents)

    def renew(self, block: int) -> None:
        """Raises a block's generation: its old contents are void. The `on_reuse` of a `BlockPool`."""
        self.generations[block] += np.uint64(1)

    def piece_offset(self, component: int, block: int) -> int:
        """Byte offset of a piece from the start of the arena."""
        return self.offsets[component] + block * self.layout.piece_bytes(component)

    def piece(self, component: int, block: int, num_tokens: int | None = None) -> memoryview:
        """The bytes of a piece, writable; of its first `num_tokens` slots if given."""
        start = self.piece_offset(component, block)
        slot_bytes = self.layout.components[component].slot_bytes
        length = (self.layout.block_size if num_tokens is None else num_tokens) * slot_bytes
        return self.buffer[start : start + length]

    def close(self) -> None:
        """Closes the file descriptor. The mapping goes with the last tensor over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
