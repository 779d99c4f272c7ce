"""Geometry of prompts, and the destination's account of pieces."""

from __future__ import annotations

import numpy as np
import pytest

from kv_transfer.geometry import announceable_slots, final_slots
from kv_transfer.manifest import PIECE_RECORD, Records
from kv_transfer.pieces import PieceTable
from pd_engine.errors import FailedPrecondition, InvalidArgument
from support.handoff_prompt import ALL_KINDS, PAGED

KINDS = len(ALL_KINDS.components)


def table(num_tokens: int = 14, num_held: int = 0, max_refetches: int = 1) -> PieceTable:
    return PieceTable(PAGED, num_tokens, num_held, num_arena_blocks=20, max_refetches=max_refetches)


def record(component: int, block: int, num_valid: int, *, block_id: int | None = None, checksum: int = 0) -> Records:
    made = np.zeros(1, dtype=PIECE_RECORD)
    made[0] = (component, block, 10 + block if block_id is None else block_id, num_valid, 1, checksum)
    return made


@pytest.mark.parametrize(("num_tokens", "paged", "ring"), [
    (1, [1], [1]), (4, [4], [4]), (5, [4, 1], [4, 1]), (6, [4, 2], [4, 2]), (7, [4, 3], [4, 2]),
    (13, [4, 4, 4, 1], [4, 2, 0, 0]),
])
def test_slots_of_every_kind(num_tokens: int, paged: list[int], ring: list[int]) -> None:
    snapshot = [4] + [0] * (len(paged) - 1)
    assert final_slots(ALL_KINDS, num_tokens, 0).tolist() == [paged, ring, snapshot]


def test_held_blocks_are_not_moved() -> None:
    assert final_slots(PAGED, 14, 2).tolist() == [[0, 0, 4, 2], [0, 0, 4, 2]]
    assert table(14, 2).num_bytes == 6 * PAGED.bytes_per_token


def test_a_layout_with_state_cannot_share_blocks() -> None:
    with pytest.raises(FailedPrecondition):
        final_slots(ALL_KINDS, 14, 1)


def test_what_may_be_announced_while_a_prompt_is_computed() -> None:
    final_CB = final_slots(ALL_KINDS, 13, 0)
    announceable = [
        [announceable_slots(ALL_KINDS, c, done, final_CB[c], 13).tolist() for c in range(KINDS)] for done in (3, 8, 13)
    ]
    nothing = [0, 0, 0, 0]
    assert announceable == [
        [nothing, nothing, nothing], [[4, 4, 0, 0], nothing, nothing], [[4, 4, 4, 1], [4, 2, 0, 0], [4, 0, 0, 0]],
    ]


def test_a_tail_that_is_announced_again_is_fetched_from_where_it_ended() -> None:
    pieces = table(6)
    pieces.announce(record(0, 1, 1, checksum=5))
    first = pieces.take(1 << 20)
    assert first is not None
    pieces.announce(record(0, 1, 2, checksum=6))
    assert pieces.take(1 << 20) is None, "the piece is in flight"
    pieces.settle(first, np.array([True]))
    second = pieces.take(1 << 20)
    assert second is not None
    assert (second.first_slots.tolist(), second.num_valid.tolist()) == ([1], [2])
    assert second.checksums.tolist() == [6], "of all its valid slots"
    pieces.settle(second, np.array([False]))
    third = pieces.take(1 << 20)
    assert third is not None
    assert third.first_slots.tolist() == [0], "a wrong piece is fetched whole"


def test_refetches_are_bounded() -> None:
    pieces = table(4, max_refetches=2)
    pieces.announce(record(0, 0, 4))
    for _ in range(3):
        batch = pieces.take(1 << 20)
        assert batch is not None
        assert not pieces.has_lost
        pieces.settle(batch, np.array([False]))
    assert pieces.take(1 << 20) is None
    assert pieces.has_lost
    assert pieces.is_settled
    assert pieces.missing_blocks() == (0,)


def test_a_batch_keeps_to_its_size_and_has_at_least_one_piece() -> None:
    pieces = table(14)
    for block in range(3):
        pieces.announce(record(0, block, 4))
    sizes = [len(batch) for batch in iter(lambda: pieces.take(100), None)]
    assert sizes == [2, 1]
    pieces = table(14)
    pieces.announce(record(0, 0, 4))
    assert len(pieces.take(1) or ()) == 1


def test_leading_blocks_survive_in_all_components_only() -> None:
    pieces = table(14)
    for component, blocks in ((0, (0, 1, 2)), (1, (0, 2, 3))):
        for block in blocks:
            pieces.announce(record(component, block, 4 if block < 3 else 2))
    while (batch := pieces.take(1 << 20)) is not None:
        pieces.settle(batch, np.ones(len(batch), dtype=np.bool_))
    assert pieces.missing_blocks() == (1, 3)
    assert pieces.num_leading_full_blocks() == 1


@pytest.mark.parametrize(("then", "named"), [
    (record(0, 1, 4, block_id=12), "block_id must be the same"),
    (record(0, 2, 4, block_id=11), "stands for two blocks"),
    (record(0, 1, 3), "never fewer"),
    (record(0, 1, 4, checksum=9), "checksum must be the same"),
    (np.concatenate([record(1, 2, 4), record(1, 2, 4)]), "twice"),
    (record(0, 4, 1), "block must be below 4"),
    (record(2, 0, 1), "component must be below 2"),
    (record(0, 3, 3), "num_valid must be at most"),
    (record(0, 2, 0), "at least 1"),
    (record(0, 2, 4, block_id=20), "block_id must be below 20"),
])
def test_contradictions_are_refused(then: Records, named: str) -> None:
    pieces = table()
    pieces.announce(record(0, 1, 4))
    with pytest.raises(InvalidArgument, match=named):
        pieces.announce(then)
    batch = pieces.take(1 << 20)
    assert batch is not None
    assert batch.blocks.tolist() == [1]
