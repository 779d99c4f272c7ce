"""From a batch of pieces to byte ranges, and from fetched bytes to a verdict.

Shape suffix: N pieces of a batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_transfer.destination_state import Fetch
from kv_transfer.geometry import piece_starts, slot_bytes
from kv_transfer.transport import Checksums, Fetched, Spans, UInt64s
from pd_engine.cache.arena import Arena


def spans_of(fetch: Fetch, arena: Arena, num_source_blocks: int) -> Spans:
    """Where the slots of a fetch lie in both arenas."""
    batch, layout = fetch.batch, arena.layout
    slot_bytes_N = slot_bytes(layout)[batch.components]
    skipped_N = batch.first_slots * slot_bytes_N
    return Spans(
        block_ids=batch.source_block_ids,
        source_offsets=piece_starts(layout, num_source_blocks, batch.components, batch.source_block_ids) + skipped_N,
        offsets=piece_starts(layout, arena.num_blocks, batch.components, np.array(fetch.block_ids)) + skipped_N,
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
        is_right_N &= _checksums_N(fetch, fetched, arena, checksums) == batch.checksums
    return is_right_N


def take_in(fetch: Fetch, is_right_N: npt.NDArray[np.bool_], arena: Arena) -> None:
    """The pieces that were verified go from the arena's buffer to its components, while their fetch still counts as in
    flight: nobody else has the blocks."""
    components_N, block_ids_N = fetch.batch.components[is_right_N], np.array(fetch.block_ids)[is_right_N]
    for component in np.unique(components_N).tolist():
        arena.take_in(component, block_ids_N[components_N == component])


def must_read(fetch: Fetch, fetched: Fetched, checksums: Checksums | None) -> bool:
    """Whether `verify` reads pieces in the arena (which takes as long as a copy), or only compares."""
    return checksums is not None and (fetched.checksums is None or bool(fetch.batch.first_slots.any()))


def _checksums_N(fetch: Fetch, fetched: Fetched, arena: Arena, checksums: Checksums) -> UInt64s:
    """Of all valid slots of each piece. The transport's are of what it fetched: they serve where that is all of it."""
    batch = fetch.batch
    sums_N = np.zeros(len(batch), dtype=np.uint64) if fetched.checksums is None else fetched.checksums.copy()
    is_open_N = np.full(len(batch), fetched.checksums is None) | (batch.first_slots > 0)
    if is_open_N.any():
        starts_N = piece_starts(arena.layout, arena.num_blocks, batch.components, np.array(fetch.block_ids))
        lengths_N = batch.num_valid * slot_bytes(arena.layout)[batch.components]
        octets = np.frombuffer(arena.buffer, dtype=np.uint8)
        sums_N[is_open_N] = checksums(octets, starts_N[is_open_N], lengths_N[is_open_N])
    return sums_N
