"""What a correct worker computes for one journey, for layouts of every kind of component."""

from __future__ import annotations

import copy

import numpy as np

from kv_transfer.geometry import final_slots
from pd_engine.cache.arena import Arena
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind

BLOCK_SIZE = 4
PAGED = CacheLayout(
    block_size=BLOCK_SIZE,
    components=(
        Component(name="layers.0", kind=ComponentKind.PAGED, width=3, dtype="fp32"),
        Component(name="mtp.0", kind=ComponentKind.PAGED, width=2, dtype="bf16", first_position=1),
    ),
)
ALL_KINDS = CacheLayout(
    block_size=BLOCK_SIZE,
    components=(
        Component(name="layers.0", kind=ComponentKind.PAGED, width=2, dtype="fp32"),
        Component(name="layers.0.window", kind=ComponentKind.RING, width=3, dtype="bf16", window_slots=6),
        Component(name="layers.0.state", kind=ComponentKind.SNAPSHOT, width=1, dtype="fp32"),
    ),
)


class Prompt:
    """What every correct worker computes for one journey: bytes by component and piece."""

    def __init__(self, layout: CacheLayout, num_tokens: int, seed: int) -> None:
        self.layout = layout
        self.num_tokens = num_tokens
        self.seed = seed
        random = np.random.default_rng(seed)
        self._slots = [random.bytes(num_tokens * c.slot_bytes) for c in layout.components]
        self._states = [random.bytes(layout.piece_bytes(c)) for c in range(len(layout.components))]

    @property
    def token_ids(self) -> list[int]:
        return [1_000 * self.seed + position for position in range(self.num_tokens)]

    def beginning(self, num_tokens: int) -> Prompt:
        """Its first tokens alone, for a layout without anything that depends on the rest."""
        shorter = copy.copy(self)
        shorter.num_tokens = num_tokens
        return shorter

    def write(self, arena: Arena, blocks: tuple[int, ...], component: int, first: int, end: int) -> None:
        """As a forward pass over positions first..end-1 would."""
        part = self.layout.components[component]
        if part.kind is ComponentKind.SNAPSHOT:
            arena.piece(component, blocks[0])[:] = self._states[component]
            return
        for position in range(first, end):
            slot = position % part.window_slots if part.kind is ComponentKind.RING else position
            piece = arena.piece(component, blocks[slot // BLOCK_SIZE])
            start = slot % BLOCK_SIZE * part.slot_bytes
            piece[start : start + part.slot_bytes] = self._slot(component, position)

    def piece(self, component: int, block: int, num_valid: int) -> list[bytes]:
        """The final contents of a piece's valid slots, one entry a slot."""
        part = self.layout.components[component]
        if part.kind is ComponentKind.SNAPSHOT:
            size = part.slot_bytes
            return [self._states[component][slot * size : (slot + 1) * size] for slot in range(num_valid)]
        slots = range(block * BLOCK_SIZE, block * BLOCK_SIZE + num_valid)
        if part.kind is ComponentKind.PAGED:
            return [self._slot(component, slot) for slot in slots]
        last = [self.num_tokens - 1 - (self.num_tokens - 1 - slot) % part.window_slots for slot in slots]
        return [self._slot(component, position) for position in last]

    def assert_piece(self, arena: Arena, block_id: int, component: int, block: int, num_valid: int) -> None:
        expected = b"".join(self.piece(component, block, num_valid))
        got = bytes(arena.piece(component, block_id, num_valid))
        assert got == expected, f"{self.layout.components[component].name}, block {block}: its contents differ"

    def assert_in(self, arena: Arena, blocks: tuple[int, ...]) -> None:
        """The decode side has every byte that matters."""
        for component, row in enumerate(final_slots(self.layout, self.num_tokens, 0)):
            for block, num_valid in enumerate(row.tolist()):
                self.assert_piece(arena, blocks[block], component, block, num_valid)

    def _slot(self, component: int, position: int) -> bytes:
        size = self.layout.components[component].slot_bytes
        return self._slots[component][position * size : (position + 1) * size]
