"""The index of cached blocks: events in, leading blocks a worker out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pd_engine.errors import DataLoss
from pd_engine.hashing import block_hashes
from pd_router.prefix_index import Applied, CacheEvents, PrefixIndex

PROMPT = block_hashes(range(16 * 8), fingerprint="ab")
OTHER = block_hashes(range(1, 16 * 4 + 1), fingerprint="ab")
EPOCH = "e1"


def snapshot(stored: Sequence[bytes], *, epoch: str = EPOCH, sequence: int = 1) -> CacheEvents:
    return CacheEvents(epoch=epoch, previous_sequence=0, sequence=sequence, is_snapshot=True, stored=stored)


def events(
    sequence: int, *, stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), previous: int | None = None
) -> CacheEvents:
    return CacheEvents(
        epoch=EPOCH, previous_sequence=sequence - 1 if previous is None else previous, sequence=sequence,
        stored=stored, removed=removed,
    )


def index_with(**held: Sequence[bytes]) -> PrefixIndex:
    index = PrefixIndex(max_entries=1_000)
    for worker_id, stored in held.items():
        assert index.apply(worker_id, snapshot(stored)) is Applied.IN_ORDER
    return index


def test_one_look_up_answers_for_all_workers() -> None:
    index = index_with(a=PROMPT, b=PROMPT[:3], c=OTHER, d=[*PROMPT[:3], *OTHER])
    assert index.held(PROMPT) == {"a": 8, "b": 3, "d": 3}
    assert index.held(OTHER) == {"c": 4, "d": 4}
    assert index.held([*PROMPT, *OTHER]) == {"a": 8, "b": 3, "d": 3}
    assert index.held([]) == {}
    assert index.held(block_hashes(range(16), fingerprint="cd")) == {}


def test_blocks_behind_a_hole_do_not_count() -> None:
    assert index_with(a=[*PROMPT[:2], *PROMPT[3:]], b=PROMPT[1:]).held(PROMPT) == {"a": 2}


def test_events_in_order_are_taken_over() -> None:
    index = index_with(a=PROMPT[:2])
    assert index.apply("a", events(2, stored=PROMPT[2:5])) is Applied.IN_ORDER
    assert index.held(PROMPT) == {"a": 5}
    assert index.apply("a", events(3, removed=PROMPT[4:], stored=OTHER)) is Applied.IN_ORDER
    assert index.held(PROMPT) == {"a": 4}
    assert index.held(OTHER) == {"a": 4}
    assert index.resume("a", EPOCH) == 3


@pytest.mark.parametrize("previous", [0, 2, 7])
def test_after_a_gap_nothing_changes_until_a_snapshot_comes(previous: int) -> None:
    index = index_with(a=PROMPT[:2])
    assert index.apply("a", events(8, stored=PROMPT, previous=previous)) is Applied.GAP
    assert index.held(PROMPT) == {"a": 2}
    assert index.resume("a", EPOCH) == 1
    assert index.apply("a", snapshot(PROMPT[:6], sequence=8)) is Applied.IN_ORDER
    assert index.held(PROMPT) == {"a": 6}
    assert index.apply("a", events(9, removed=PROMPT[:1])) is Applied.IN_ORDER
    assert index.held(PROMPT) == {}


def test_events_before_the_first_snapshot_are_a_gap() -> None:
    index = PrefixIndex(max_entries=10)
    assert index.apply("a", events(1, stored=PROMPT[:1], previous=0)) is Applied.GAP
    assert index.resume("a", EPOCH) == 0
    assert index.apply("a", events(1, stored=PROMPT[:1], previous=0)) is Applied.GAP
    assert index.num_entries == 0


def test_another_life_of_a_worker_begins_empty() -> None:
    index = index_with(a=PROMPT, b=PROMPT)
    assert index.resume("a", EPOCH) == 1
    assert index.resume("a", "e2") == 0
    assert index.held(PROMPT) == {"b": 8}
    late = events(2, stored=PROMPT)
    assert index.apply("a", late) is Applied.GAP  # of the life before
    assert index.apply("a", snapshot(OTHER, epoch="e2")) is Applied.IN_ORDER
    assert index.held(OTHER) == {"a": 4}


def test_a_snapshot_of_a_life_that_nobody_announced_counts() -> None:
    index = index_with(a=PROMPT)
    assert index.apply("a", snapshot(OTHER, epoch="e2")) is Applied.IN_ORDER
    assert index.held(PROMPT) == {}
    assert index.held(OTHER) == {"a": 4}


def test_a_worker_that_left_leaves_nothing_and_its_place_is_taken() -> None:
    index = index_with(a=PROMPT, b=PROMPT[:1])
    index.forget("a")
    index.forget("never seen")
    assert index.held(PROMPT) == {"b": 1}
    assert (index.num_entries, index.num_blocks, index.num_blocks_at("a")) == (1, 1, 0)
    index.apply("c", snapshot(OTHER))
    assert index.held(OTHER) == {"c": 4}
    index.forget("b")
    index.forget("c")
    assert (index.num_entries, index.num_blocks) == (0, 0)


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    index = PrefixIndex(max_entries=5)
    index.apply("a", snapshot(PROMPT[:3]))
    index.apply("b", snapshot([]))
    index.apply("b", events(2, stored=PROMPT[:4]))
    assert index.held(PROMPT) == {"a": 3, "b": 2}
    assert (index.num_entries, index.num_left_out) == (5, 2)
    index.apply("b", events(3, removed=PROMPT[3:4]))  # it was never taken in
    index.apply("a", events(2, removed=PROMPT[:3]))
    index.apply("b", events(4, stored=PROMPT[2:3]))
    assert index.held(PROMPT) == {"b": 3}


def test_what_is_no_hash_is_refused_as_a_whole() -> None:
    index = index_with(a=PROMPT)
    with pytest.raises(DataLoss, match="worker a: a block hash has 16 bytes, got 3"):
        index.apply("a", events(2, stored=[PROMPT[0], b"abc"], removed=PROMPT[3:4]))
    assert index.held(PROMPT) == {"a": 8}
