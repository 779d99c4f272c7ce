"""Checksums and copies of pieces, on every implementation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels.block_checksum import ranges
from pd_kernels.block_checksum.ranges import range_checksums
from pd_kernels.block_checksum.reference import MASK, NUM_KEYS, RATIO, checksum, keys, mix
from pd_kernels.block_copy import copy, copy_and_checksum_pieces, copy_pieces, memcpy_pieces
from pd_kernels.cpu.native import load_library, usable_isas
from pd_kernels.ops import Ops
from support import kernel_ops

PIECES = st.lists(st.binary(max_size=300), max_size=8)


@pytest.fixture(params=kernel_ops.names(), scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return kernel_ops.load(request.param)


@pytest.fixture(params=[*usable_isas(), "numpy"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and checksums of ranges with the compiled loops of each instruction set, and with numpy."""
    library = None if request.param == "numpy" else load_library(request.param)
    monkeypatch.setattr(copy, "compiled", lambda: library)
    monkeypatch.setattr(ranges, "compiled", lambda: library)


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


def test_the_definition_word_by_word() -> None:
    """Pieces longer than one stretch of keys, whole words or not."""
    table = keys().tolist()
    for num_bytes in (4 * NUM_KEYS - 1, 4 * NUM_KEYS, 4 * NUM_KEYS + 1, 9 * NUM_KEYS + 2):
        piece = np.random.default_rng(num_bytes).bytes(num_bytes)
        total = num_bytes * 0xC2B2AE3D27D4EB4F
        for word in range(-(-num_bytes // 4)):
            value = int.from_bytes(piece[4 * word : 4 * word + 4], "little")
            total += value * table[word % NUM_KEYS] * pow(RATIO, word // NUM_KEYS, 1 << 64)
        assert checksum(piece) == mix(total & MASK)


def test_pieces_of_several_stretches(ops: Ops) -> None:
    memory = np.random.default_rng(3).bytes(20 * NUM_KEYS)
    pieces = [memoryview(memory)[1 : 1 + length] for length in (4095, 4096, 4097, 8192, 12_287, 18_432)]
    assert ops.block_checksums(pieces).tolist() == [checksum(piece) for piece in pieces]


def test_words_exchanged_between_stretches_are_noticed(ops: Ops) -> None:
    """They have the same key: only the stretch tells them apart."""
    piece = bytearray(np.random.default_rng(4).bytes(12 * NUM_KEYS))
    swapped = bytearray(piece)
    swapped[:4], swapped[8 * NUM_KEYS : 8 * NUM_KEYS + 4] = piece[8 * NUM_KEYS : 8 * NUM_KEYS + 4], piece[:4]
    assert swapped != piece
    before, after = ops.block_checksums([memoryview(piece), memoryview(swapped)])
    assert before != after


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
    destination[:] = 0
    places = [np.array(values, dtype=np.int64) for values in (starts, ends, lengths)]
    sums = copy_and_checksum_pieces(source, destination, *places)
    assert np.array_equal(destination, expected)
    assert sums.tolist() == [checksum(source[start : start + n]) for start, n in zip(starts, lengths, strict=True)]
    assert range_checksums(source, places[0], places[2]).tolist() == sums.tolist()


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("shift", [0, 1, 4, 16])
def test_long_pieces_are_copied_and_checksummed_wherever_they_lie(shift: int) -> None:
    """Aligned for the widest stores, and not."""
    source = np.frombuffer(np.random.default_rng(5).bytes(60_000), dtype=np.uint8)
    memory = np.zeros(70_000, dtype=np.uint8)
    destination = memory[-memory.ctypes.data % 64 :][:64_000]
    starts, lengths = np.array([3, 20_480, 40_000]), np.array([18_432, 18_432, 4_133])
    ends = np.array([shift, 18_432 + shift, 40_960 + shift])
    sums = copy_and_checksum_pieces(source, destination, starts, ends, lengths)
    expected = np.zeros(64_000, dtype=np.uint8)
    for start, end, length in zip(starts, ends, lengths, strict=True):
        expected[end : end + length] = source[start : start + length]
    assert np.array_equal(destination, expected)
    assert sums.tolist() == [checksum(source[start : start + n]) for start, n in zip(starts, lengths, strict=True)]
    assert sums.tolist() == range_checksums(destination, ends, lengths).tolist()
    for copy_only in (copy_pieces, memcpy_pieces):
        destination[:] = 0
        copy_only(source, destination, starts, ends, lengths)
        assert np.array_equal(destination, expected)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize(("start", "end", "length"), [(-1, 0, 4), (0, -1, 4), (0, 0, -1), (97, 0, 4), (0, 61, 4)])
def test_pieces_beyond_a_buffer_are_refused(start: int, end: int, length: int) -> None:
    source, destination = np.ones(100, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    with pytest.raises(ValueError, match="a piece is not within"):
        copy_pieces(source, destination, *(np.array([0, value], dtype=np.int64) for value in (start, end, length)))
    with pytest.raises(ValueError, match="a piece is not within"):
        copy_and_checksum_pieces(source, destination, *(np.array([value]) for value in (start, end, length)))
    with pytest.raises(ValueError, match="a piece is not within"):
        memcpy_pieces(source, destination, *(np.array([value]) for value in (start, end, length)))
    assert not destination.any()
    with pytest.raises(ValueError, match="a piece is not within the buffer of 64 bytes"):
        range_checksums(destination, np.array([max(end, 0)]), np.array([length if length < 0 else 65]))
