"""Hostile manifests: whatever the bytes, a part is taken in whole and right, or refused and nothing has changed."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.geometry import final_slots
from kv_transfer.manifest import PIECE_RECORD, Closing, Failed, HiddenState, Opening, Part, Pieces
from kv_transfer.manifest_wire import pack_part, unpack_hello, unpack_part
from kv_transfer.pieces import PieceTable
from pd_engine.cache.layout import CacheLayout
from pd_engine.errors import ErrorCode, InvalidArgument
from pd_engine.sequence import TokenLogprobs
from support.handoff_prompt import ALL_KINDS, PAGED

FUZZ = settings(max_examples=400, deadline=None, derandomize=True)
NUM_TOKENS, NUM_ARENA_BLOCKS = 14, 9


def parts() -> list[Part]:
    records = np.zeros(3, dtype=PIECE_RECORD)
    records["block"], records["num_valid"] = np.arange(3), 4
    return [
        Opening(
            worker_id="p", epoch="a" * 32, fingerprint="ab", layout=ALL_KINDS, host_id="h", num_tokens=NUM_TOKENS,
            num_held_blocks=0, num_arena_blocks=NUM_ARENA_BLOCKS, lease_ms=1_000, checksums=True,
            transports={"tcp": {"host": "h", "port": 1}},
        ),
        Pieces(records),
        Closing(
            first_token_id=3, num_prompt_tokens=NUM_TOKENS, logprobs=TokenLogprobs(logprob=-1.0, top=((3, -1.0),)),
            hidden=HiddenState(data=b"12345678", dtype="bf16", width=4),
        ),
        Failed(code=ErrorCode.INTERNAL, message="m"),
    ]


PACKED = [pack_part(part) for part in parts()]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def read(data: bytes) -> Part | None:
    """None where it is refused; every other exception is a failure."""
    try:
        return unpack_part(data)
    except InvalidArgument:
        return None


@FUZZ
@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    assert read(data) is None
    with pytest.raises(InvalidArgument):
        unpack_hello(data)


@FUZZ
@given(
    number=st.integers(0, 3), where=st.integers(0, 1 << 16), change=st.binary(min_size=0, max_size=4),
    num_removed=st.integers(0, 4),
)
def test_damaged_parts(number: int, where: int, change: bytes, num_removed: int) -> None:
    """Bytes replaced, removed and put in: what is still read packs to something that is read alike."""
    packed = PACKED[number]
    start = where % (len(packed) + 1)
    part = read(packed[:start] + change + packed[start + num_removed :])
    if part is not None:
        again = read(pack_part(part))
        assert type(again) is type(part)


@FUZZ
@given(number=st.integers(0, 3), end=st.integers(0, 1 << 16))
def test_truncated_parts(number: int, end: int) -> None:
    assert read(PACKED[number][: end % len(PACKED[number])]) is None


@FUZZ
@given(number=st.integers(0, 3), field=st.integers(0, 20), value=VALUES)
def test_fields_of_any_value(number: int, field: int, value: object) -> None:
    fields = msgpack.unpackb(PACKED[number])
    names = list(fields)
    fields[names[field % len(names)]] = value
    read(msgpack.packb(fields))


@FUZZ
@given(value=VALUES)
def test_any_value(value: object) -> None:
    assert read(msgpack.packb(value)) is None


RECORD = st.tuples(
    st.integers(0, 4), st.integers(0, 6), st.integers(0, 12), st.integers(0, 6), st.integers(0, 2), st.integers(0, 2)
)


@FUZZ
@given(
    layout=st.sampled_from([PAGED, ALL_KINDS]), batches=st.lists(st.lists(RECORD, min_size=1, max_size=5), max_size=8)
)
def test_any_records(layout: CacheLayout, batches: list[list[tuple[int, ...]]]) -> None:
    """What a table takes in is in range, does not overlap, and is what it hands out to be fetched."""
    table = PieceTable(layout, NUM_TOKENS, 0, num_arena_blocks=NUM_ARENA_BLOCKS, max_refetches=1)
    final_CB = final_slots(layout, NUM_TOKENS, 0)
    ids: dict[int, tuple[int, int]] = {}
    for batch in batches:
        before = state(table)
        try:
            table.announce(np.array(batch, dtype=PIECE_RECORD))
        except InvalidArgument:
            assert state(table) == before
            continue
        for component, block, block_id, num_valid, generation, _ in batch:
            assert 1 <= num_valid <= final_CB[component, block]
            assert block_id < NUM_ARENA_BLOCKS
            assert ids.setdefault(block, (block_id, generation)) == (block_id, generation)
    assert len({block_id for block_id, _ in ids.values()}) == len(ids)
    while (taken := table.take(1 << 20)) is not None:
        pairs = list(zip(taken.components.tolist(), taken.blocks.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        for (component, block), block_id in zip(pairs, taken.source_block_ids.tolist(), strict=True):
            assert ids[block][0] == block_id
            assert final_CB[component, block] >= 1
        table.settle(taken, np.ones(len(taken), dtype=np.bool_))


@pytest.mark.parametrize("field", ["block", "block_id", "num_valid", "component"])
def test_the_largest_numbers_are_out_of_range(field: str) -> None:
    record = np.zeros(1, dtype=PIECE_RECORD)
    record["num_valid"] = 4
    record[field] = np.iinfo(PIECE_RECORD[field]).max
    table = PieceTable(PAGED, NUM_TOKENS, 0, num_arena_blocks=NUM_ARENA_BLOCKS, max_refetches=1)
    with pytest.raises(InvalidArgument, match=field):
        table.announce(record)


def state(table: PieceTable) -> tuple[bytes, ...]:
    return tuple(value.tobytes() for value in vars(table).values() if isinstance(value, np.ndarray))
