"""What one block of cache is made of. A handoff describes itself by this; nothing assumes DeepSeek-V3's shape.

An arena is component-major: all blocks of component 0, then all of component 1, and so on, so that each component
is one tensor [num_blocks, block_size, width] and each piece (one component's part of one block) is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LAYOUT_VERSION = 1
FP8_LAYOUT_VERSION = 2  # with slots in FP8
FP8_GROUP = 128         # numbers of a latent that share a scale


class ComponentKind(Enum):
    PAGED = "paged"        # so many bytes a slot, append-only
    RING = "ring"          # a window of the last slots
    SNAPSHOT = "snapshot"  # fixed bytes a sequence


DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def fp8_slot_bytes(latent_width: int, rope_width: int) -> int:
    """Bytes of a slot in FP8 (pd_kernels.latent_fp8): 656 for 512 + 64 numbers."""
    assert latent_width % FP8_GROUP == 0, latent_width
    return latent_width + 4 * (latent_width // FP8_GROUP) + 2 * rope_width


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One layer's part of the cache.

    Attributes:
        name: "layers.0", ..., "mtp.0": unique in a layout.
        kind: how its bytes grow with the sequence.
        width: numbers a slot; bytes a slot of "fp8", whose slots are e4m3 numbers, their scales and a bf16 rope key.
        dtype: a key of `DTYPE_BYTES`.
        first_position: slots before it are zero and never attended (1 for MTP's layer).
        window_slots: of a ring: position p is in slot p modulo this; 0 for the other kinds.

    Slot s of a paged or ring component is in the sequence's block s // block_size. A snapshot is the whole piece of
    the sequence's first block.
    """

    name: str
    kind: ComponentKind
    width: int
    dtype: str
    first_position: int = 0
    window_slots: int = 0

    @property
    def slot_bytes(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayout:
    """All components of a block, in the order of the arena."""

    block_size: int
    components: tuple[Component, ...]
    version: int = LAYOUT_VERSION

    @property
    def has_fp8(self) -> bool:
        return any(component.dtype == "fp8" for component in self.components)

    @property
    def bytes_per_token(self) -> int:
        return sum(component.slot_bytes for component in self.components)

    def piece_bytes(self, component: int) -> int:
        """Bytes of one whole piece of that component."""
        return self.block_size * self.components[component].slot_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bytes_per_token

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
