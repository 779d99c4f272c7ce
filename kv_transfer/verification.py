"""From a batch of pieces to byte ranges, and from fetched bytes to a verdict. Runs outside the event loop.

Shape suffix: N pieces of a batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_transfer.destination_state import Fetch
from kv_transfer.geometry import slot_bytes
from kv_transfer.publisher import Checksums
from kv_transfer.transport import Fetched, Spans
from pd_engine.cache.arena import Arena, component_offsets
from pd_engine.cache.layout import CacheLayout


def spans_of(fetch: Fetch, arena: Arena, num_source_blocks: int) -> Spans:
    """Where the slots of a fetch lie in both arenas."""
    batch, layout = fetch.batch, arena.layout
    slot_bytes_N = slot_bytes(layout)[batch.components]
    skipped_N = batch.first_slots * slot_bytes_N
    return Spans(
        block_ids=batch.source_block_ids,
        source_offsets=_starts(layout, num_source_blocks, batch.components, batch.source_block_ids) + skipped_N,
        offsets=_starts(layout, arena.num_blocks, batch.components, np.array(fetch.block_ids)) + skipped_N,
        lengths=(batch.num_valid - batch.first_slots) * slot_bytes_N,
    )


def verify(fetch: Fetch, fetched: Fetched, arena: Arena, checksums: Checksums | None) -> npt.NDArray[np.bool_]:
    """bool [N]: whether each piece is what was announced: the source's block belonged to the handoff before and after
    the copy, and the bytes of all its valid slots, earlier fetched ones included, have the announced checksum."""
    batch = fetch.batch
    is_right_N: npt.NDArray[np.bool_] = (fetched.generations_before == batch.generations) & (
        fetched.generations_after == batch.generations
    )
    if checksums is not None:
        views = [
            arena.piece(component, block, num_valid)
            for component, block, num_valid in zip(
                batch.components.tolist(), fetch.block_ids, batch.num_valid.tolist(), strict=True
            )
        ]
        is_right_N &= checksums(views) == batch.checksums
    return is_right_N


def _starts(
    layout: CacheLayout, num_blocks: int, component_N: npt.NDArray[np.int64], block_id_N: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """int64 [N]: byte offsets of whole pieces in an arena of `num_blocks` blocks."""
    offsets_C = np.array(component_offsets(layout, num_blocks)[0], dtype=np.int64)
    piece_bytes_C = slot_bytes(layout) * layout.block_size
    starts_N: npt.NDArray[np.int64] = offsets_C[component_N] + block_id_N * piece_bytes_C[component_N]
    return starts_N
