"""Checksums of a sequence's blocks: what monolithic and distributed runs compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pd_engine.cache.arena import Arena
from pd_kernels.ops import Ops


def slot_checksums(ops: Ops, arena: Arena, block_ids: Sequence[int], num_tokens: int) -> list[int]:
    """One checksum for each piece that holds slots 0..num_tokens-1: all blocks of component 0, then of component 1,
    and so on. Of the last block only the valid slots count."""
    block_size = arena.layout.block_size
    num_blocks = arena.layout.num_blocks_for(num_tokens)
    ids = np.array(block_ids[:num_blocks], dtype=np.int64)
    for component in range(len(arena.layout.components)):
        arena.expose(component, ids, arena.generations[ids])
    pieces = [
        arena.piece(component, block, min(block_size, num_tokens - index * block_size))
        for component in range(len(arena.layout.components))
        for index, block in enumerate(block_ids[:num_blocks])
    ]
    return [int(checksum) for checksum in ops.block_checksums(pieces)]
