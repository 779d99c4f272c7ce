"""Which slots of which pieces a prompt of P tokens consists of, for every kind of component. Pure numpy.

Shape suffixes: C components of the layout, B blocks of the sequence.

    paged     slot p of the sequence is slot p % K of block p // K (K slots a block); append-only
    ring      slot p is slot p % W: min(P, W) slots, final only when the prompt is computed
    snapshot  the whole piece of block 0, final only when the prompt is computed
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pd_engine.cache.arena import component_offsets
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.errors import FailedPrecondition

Int64s = npt.NDArray[np.int64]


def final_slots(layout: CacheLayout, num_tokens: int, num_held_blocks: int) -> Int64s:
    """int64 [C, B]: slots of each piece that a handoff of `num_tokens` tokens moves; 0 for held blocks.

    Raises:
        FailedPrecondition: blocks are held and the layout has components that are not a function of a block's
            tokens alone.
    """
    assert num_tokens >= 1, num_tokens
    if num_held_blocks and any(component.kind is not ComponentKind.PAGED for component in layout.components):
        raise FailedPrecondition(
            f"{num_held_blocks} held blocks: a layout with ring or snapshot components cannot share blocks"
        )
    assert 0 <= num_held_blocks <= num_tokens // layout.block_size, (num_held_blocks, num_tokens)
    slots = np.stack(
        [_spread(_num_slots(component, layout.block_size, num_tokens), layout, num_tokens)
         for component in layout.components]
    )
    slots[:, :num_held_blocks] = 0
    return slots


def announceable_slots(layout: CacheLayout, component: int, num_valid_tokens: int, final_B: Int64s,
                       num_tokens: int) -> Int64s:
    """int64 [B]: slots of each piece of one component that may be announced once `num_valid_tokens` of `num_tokens`
    leading tokens are computed. Of a paged component every full block, and the tail only when it is final: a tail
    that would be announced again later costs a second fetch and saves nothing. Of the other kinds all or nothing.

    Args:
        final_B: that component's row of `final_slots`.
    """
    if layout.components[component].kind is ComponentKind.PAGED:
        return np.where(_spread(num_valid_tokens, layout, num_tokens) >= final_B, final_B, 0)
    return final_B if num_valid_tokens >= num_tokens else np.zeros_like(final_B)


def slot_bytes(layout: CacheLayout) -> Int64s:
    """int64 [C]: bytes of one slot of each component."""
    return np.array([component.slot_bytes for component in layout.components], dtype=np.int64)


def piece_starts(layout: CacheLayout, num_blocks: int, component_N: Int64s, block_id_N: Int64s) -> Int64s:
    """int64 [N]: byte offsets of whole pieces in an arena of `num_blocks` blocks."""
    offsets_C = np.array(component_offsets(layout, num_blocks)[0], dtype=np.int64)
    piece_bytes_C = slot_bytes(layout) * layout.block_size
    starts_N: Int64s = offsets_C[component_N] + block_id_N * piece_bytes_C[component_N]
    return starts_N


def _num_slots(component: Component, block_size: int, num_tokens: int) -> int:
    if component.kind is ComponentKind.PAGED:
        return num_tokens
    if component.kind is ComponentKind.RING:
        assert component.window_slots >= 1, component
        return min(num_tokens, component.window_slots)
    return block_size


def _spread(num_slots: int, layout: CacheLayout, num_tokens: int) -> Int64s:
    """The first `num_slots` slots over the blocks of `num_tokens` tokens."""
    starts_B = np.arange(layout.num_blocks_for(num_tokens), dtype=np.int64) * layout.block_size
    return np.clip(num_slots - starts_B, 0, layout.block_size)
