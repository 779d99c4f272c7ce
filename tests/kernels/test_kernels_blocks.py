"""Checksums and copies of pieces, on every implementation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels.block_checksum.reference import checksum
from pd_kernels.block_copy import copy, copy_pieces, reference
from pd_kernels.ops import Ops
from support import kernel_ops

PIECES = st.lists(st.binary(max_size=300), max_size=8)


@pytest.fixture(params=kernel_ops.names(), scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return kernel_ops.load(request.param)


@pytest.fixture(params=["best", "numpy"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """copy_pieces with the compiled loop where there is one, and with numpy."""
    if request.param == "numpy":
        monkeypatch.setattr(copy, "_loop", lambda: reference.copy_pieces)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pieces=PIECES)
def test_checksums_are_the_definition(ops: Ops, pieces: list[bytes]) -> None:
    assert ops.block_checksums([memoryview(piece) for piece in pieces]).tolist() == [checksum(p) for p in pieces]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(piece=st.binary(min_size=1, max_size=400), where=st.integers(0, 10**6), change=st.integers(1, 255))
def test_a_changed_byte_changes_the_checksum(ops: Ops, piece: bytes, where: int, change: int) -> None:
    changed = bytearray(piece)
    changed[where % len(piece)] ^= change
    before, after = ops.block_checksums([memoryview(piece), memoryview(changed)])
    assert before != after


def test_length_order_and_zeros_count(ops: Ops) -> None:
    rng = np.random.default_rng(1)
    piece = rng.bytes(1024)
    variants = [
        piece, piece[:-1], piece + b"\0", piece[512:] + piece[:512], piece[4:8] + piece[:4] + piece[8:], bytes(1024),
        bytes(1023), bytes(1), b"",
    ]
    assert len(set(ops.block_checksums([memoryview(v) for v in variants]).tolist())) == len(variants)


def test_unaligned_pieces(ops: Ops) -> None:
    memory = np.random.default_rng(2).bytes(5000)
    pieces = [memoryview(memory)[start : start + 1152] for start in range(1, 40)]
    assert ops.block_checksums(pieces).tolist() == [checksum(piece) for piece in pieces]


@pytest.mark.usefixtures("loop")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_copied_pieces_are_equal_and_nothing_else_is_touched(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 100), max_size=10))
    source = np.frombuffer(np.random.default_rng(0).bytes(1000), dtype=np.uint8)
    starts = [data.draw(st.integers(0, 1000 - length)) for length in lengths]
    gaps = [data.draw(st.integers(0, 5)) for _ in lengths]
    ends, end = [], 0
    for gap, length in zip(gaps, lengths, strict=True):
        ends.append(end + gap)
        end += gap + length
    destination = np.zeros(end + 3, dtype=np.uint8)
    expected = destination.copy()
    for start, to, length in zip(starts, ends, lengths, strict=True):
        expected[to : to + length] = source[start : start + length]
    copy_pieces(source, destination, *(np.array(a, dtype=np.int64) for a in (starts, ends, lengths)))
    assert np.array_equal(destination, expected)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize(("start", "end", "length"), [(-1, 0, 4), (0, -1, 4), (0, 0, -1), (97, 0, 4), (0, 61, 4)])
def test_pieces_beyond_a_buffer_are_refused(start: int, end: int, length: int) -> None:
    source, destination = np.ones(100, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    with pytest.raises(ValueError, match="a piece is not within"):
        copy_pieces(source, destination, *(np.array([0, value], dtype=np.int64) for value in (start, end, length)))
    assert not destination.any()
