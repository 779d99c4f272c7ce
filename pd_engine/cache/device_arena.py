"""An arena of an accelerator: components in its memory, and for blocks that travel a window in shared memory.

Transports, generations and checksums know the window only, so that whatever moves host memory moves these blocks too.
A block goes through it twice: what is announced is copied out before (`expose`), what has arrived and is verified is
copied in (`take_in`). The window's pages take no memory until a block travels.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from pd_engine.cache.arena import TORCH_DTYPES, Arena, Int64s, UInt64s
from pd_engine.cache.layout import CacheLayout


class DeviceArena(Arena):
    """Copies are put on the device's default stream, as the steps' kernels are: they see what was launched before them,
    and what is launched after them sees what they wrote. From any thread."""

    def __init__(self, layout: CacheLayout, num_blocks: int, device: torch.device) -> None:
        super().__init__(layout, num_blocks)
        self._window = self.components
        self._renewal = threading.Lock()
        self.components = [
            torch.zeros(
                num_blocks, layout.block_size, component.width, dtype=TORCH_DTYPES[component.dtype], device=device
            )
            for component in layout.components
        ]

    @property
    def is_staged(self) -> bool:
        return True

    def renew(self, block: int) -> None:
        with self._renewal:
            super().renew(block)

    def expose(self, component: int, block_ids_N: Int64s, generations_N: UInt64s) -> None:
        """The wait for the device comes first, without the lock that `renew` may wait for. A block that has another
        owner by then keeps what that one's transport has written to its window."""
        staged = self.read_blocks(component, torch.from_numpy(block_ids_N))
        with self._renewal:
            is_current_N = torch.from_numpy(self.generations[block_ids_N] == generations_N)
            ids = torch.from_numpy(block_ids_N)[is_current_N]
            self._window[component].index_copy_(0, ids, staged[is_current_N])

    def take_in(self, component: int, block_ids_N: Int64s) -> None:
        ids = torch.from_numpy(block_ids_N)
        self.write_blocks(component, ids, self._window[component].index_select(0, ids))

    def read_blocks(self, component: int, block_ids_N: Tensor, out: Tensor | None = None) -> Tensor:
        slots = self.components[component]
        found = slots.index_select(0, block_ids_N.to(slots.device))
        return found.cpu() if out is None else out.copy_(found)

    def write_blocks(self, component: int, block_ids_N: Tensor, contents: Tensor) -> None:
        slots = self.components[component]
        slots.index_copy_(0, block_ids_N.to(slots.device), contents.to(slots.device))
