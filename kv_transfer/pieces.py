"""The destination's account of one handoff's pieces: announced, in flight, verified, lost. Pure numpy, no clock.

Shape suffixes: C components, B blocks of the prompt, N pieces of one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.geometry import Int64s, final_slots, slot_bytes
from kv_transfer.manifest import Records
from pd_engine.cache.layout import CacheLayout, ComponentKind
from pd_engine.errors import InvalidArgument

UInt64s = npt.NDArray[np.uint64]
NOT_ANNOUNCED = -1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Pieces to fetch at once: parallel arrays [N]. Slots first..num_valid-1 of each are copied; the checksum is
    over slots 0..num_valid-1."""

    components: Int64s
    blocks: Int64s            # logical
    source_block_ids: Int64s
    first_slots: Int64s
    num_valid: Int64s
    generations: UInt64s
    checksums: UInt64s
    num_bytes: int

    def __len__(self) -> int:
        return len(self.components)


class PieceTable:
    """Every piece of one handoff.

    Args:
        num_arena_blocks: blocks of the source's arena.
        max_refetches: how often one piece may be wrong before it counts as lost.
    """

    def __init__(
        self, layout: CacheLayout, num_tokens: int, num_held_blocks: int, *, num_arena_blocks: int, max_refetches: int
    ) -> None:
        self._num_full_blocks = num_tokens // layout.block_size
        self._num_arena_blocks = num_arena_blocks
        self._max_refetches = max_refetches
        self._slot_bytes_C = slot_bytes(layout)
        self._is_paged_C = np.array([c.kind is ComponentKind.PAGED for c in layout.components])
        self.final_CB = final_slots(layout, num_tokens, num_held_blocks)
        self.checksums_CB: UInt64s = np.zeros(self.final_CB.shape, dtype=np.uint64)
        self._announced_CB = np.zeros_like(self.final_CB)
        self._verified_CB = np.zeros_like(self.final_CB)
        self._wrong_CB = np.zeros_like(self.final_CB)
        self._in_flight_CB = np.zeros(self.final_CB.shape, dtype=np.bool_)
        self._generations_B: UInt64s = np.zeros(self.final_CB.shape[1], dtype=np.uint64)
        self._source_ids_B = np.full(self.final_CB.shape[1], NOT_ANNOUNCED, dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes that this handoff moves when nothing has to be fetched twice."""
        return int((self.final_CB.sum(axis=1) * self._slot_bytes_C).sum())

    @property
    def num_verified_bytes(self) -> int:
        """Of these, bytes that are here and checked."""
        return int((self._verified_CB.sum(axis=1) * self._slot_bytes_C).sum())

    @property
    def is_announced(self) -> bool:
        """Whether every piece has been announced with all its slots."""
        return bool((self._announced_CB == self.final_CB).all())

    @property
    def is_verified(self) -> bool:
        """Whether every slot is here and checked."""
        return bool((self._verified_CB == self.final_CB).all())

    @property
    def is_settled(self) -> bool:
        """Whether nothing announced can be fetched any more: each such piece is verified or lost, none in flight."""
        return not self._in_flight_CB.any() and not self._fetchable_CB().any()

    @property
    def has_lost(self) -> bool:
        """Whether a piece was wrong too often."""
        return bool((self._wrong_CB > self._max_refetches).any())

    def missing_blocks(self) -> tuple[int, ...]:
        """Logical numbers of the blocks that are not verified in all components."""
        return tuple(np.flatnonzero((self._verified_CB < self.final_CB).any(axis=0)).tolist())

    def num_leading_full_blocks(self) -> int:
        """Leading full blocks that are held or verified in every component: what a next attempt need not send. None
        if the layout has components that are not a function of a block's tokens alone."""
        if not self._is_paged_C.all():
            return 0
        missing = self.missing_blocks()
        return min(missing[0], self._num_full_blocks) if missing else self._num_full_blocks

    def announce(self, records: Records) -> None:
        """Takes in announced pieces; all or none of them.

        Raises:
            InvalidArgument: a record is out of range, contradicts an earlier one, or two overlap.
        """
        component_N = records["component"].astype(np.int64)
        block_N = records["block"].astype(np.int64)
        block_id_N = records["block_id"].astype(np.int64)
        num_valid_N = records["num_valid"].astype(np.int64)
        num_components, num_blocks = self.final_CB.shape
        _require(component_N < num_components, "component", component_N, f"below {num_components}")
        _require(block_N < num_blocks, "block", block_N, f"below {num_blocks}")
        _require(block_id_N < self._num_arena_blocks, "block_id", block_id_N, f"below {self._num_arena_blocks}")
        _require(num_valid_N >= 1, "num_valid", num_valid_N, "at least 1")
        final_N = self.final_CB[component_N, block_N]
        _require(num_valid_N <= final_N, "num_valid", num_valid_N, "at most the slots of the prompt in that piece")
        _require(
            self._is_paged_C[component_N] | (num_valid_N == final_N), "num_valid", num_valid_N,
            "final: ring and snapshot pieces are announced once",
        )
        announced_N = self._announced_CB[component_N, block_N]
        _require(num_valid_N >= announced_N, "num_valid", num_valid_N, "never fewer than before")
        _require(
            (num_valid_N > announced_N) | (records["checksum"] == self.checksums_CB[component_N, block_N]),
            "checksum", records["checksum"], "the same as before for the same slots",
        )
        self._check_places(component_N, block_N, block_id_N, records["generation"])
        self._announced_CB[component_N, block_N] = num_valid_N
        self._generations_B[block_N] = records["generation"]
        self.checksums_CB[component_N, block_N] = records["checksum"]
        self._source_ids_B[block_N] = block_id_N

    def take(self, max_bytes: int) -> Batch | None:
        """The next pieces to fetch, at most `max_bytes` but at least one; they count as in flight until `settle`."""
        component_N, block_N = np.nonzero(self._fetchable_CB())
        if len(component_N) == 0:
            return None
        first_N = self._verified_CB[component_N, block_N]
        valid_N = self._announced_CB[component_N, block_N]
        bytes_N = (valid_N - first_N) * self._slot_bytes_C[component_N]
        count = max(1, int(np.searchsorted(np.cumsum(bytes_N), max_bytes, side="right")))
        component_N, block_N = component_N[:count], block_N[:count]
        self._in_flight_CB[component_N, block_N] = True
        return Batch(
            components=component_N, blocks=block_N, source_block_ids=self._source_ids_B[block_N],
            first_slots=first_N[:count], num_valid=valid_N[:count],
            generations=self._generations_B[block_N],
            checksums=self.checksums_CB[component_N, block_N], num_bytes=int(bytes_N[:count].sum()),
        )

    def settle(self, batch: Batch, is_right_N: npt.NDArray[np.bool_]) -> None:
        """The batch has ended: right pieces are verified, wrong ones are fetched again whole, or lost."""
        assert len(is_right_N) == len(batch)
        right = (batch.components[is_right_N], batch.blocks[is_right_N])
        wrong = (batch.components[~is_right_N], batch.blocks[~is_right_N])
        self._in_flight_CB[batch.components, batch.blocks] = False
        self._verified_CB[right] = batch.num_valid[is_right_N]
        self._verified_CB[wrong] = 0
        self._wrong_CB[wrong] += 1

    def _fetchable_CB(self) -> npt.NDArray[np.bool_]:
        return (
            (self._announced_CB > self._verified_CB) & ~self._in_flight_CB & (self._wrong_CB <= self._max_refetches)
        )

    def _check_places(self, component_N: Int64s, block_N: Int64s, block_id_N: Int64s, generation_N: UInt64s) -> None:
        """One record a piece, one block id and generation a logical block, no block id for two of them."""
        num_blocks = self.final_CB.shape[1]
        if len(np.unique(component_N * num_blocks + block_N)) != len(block_N):
            raise InvalidArgument("manifest: a piece is announced twice in one part")
        is_new_N = self._source_ids_B[block_N] == NOT_ANNOUNCED
        ids_B, generations_B = self._source_ids_B.copy(), self._generations_B.copy()
        ids_B[block_N[is_new_N]] = block_id_N[is_new_N]
        generations_B[block_N[is_new_N]] = generation_N[is_new_N]
        _require(ids_B[block_N] == block_id_N, "block_id", block_id_N, "the same for all of a block")
        _require(generations_B[block_N] == generation_N, "generation", generation_N, "the same for all of a block")
        known = ids_B[ids_B != NOT_ANNOUNCED]
        if len(np.unique(known)) != len(known):
            raise InvalidArgument("manifest: one block_id stands for two blocks of the sequence")


def _require(holds_N: npt.NDArray[np.bool_], field: str, values_N: npt.NDArray[np.integer[Any]], allowed: str) -> None:
    if not holds_N.all():
        raise InvalidArgument(f"manifest: {field} must be {allowed}, got {int(values_N[np.argmin(holds_N)])}")
