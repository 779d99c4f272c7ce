"""Pieces of memory that cannot be are refused by name; nothing outside is read or written."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from pd_kernels.block_checksum.ranges import WrongPieces, range_checksums
from pd_kernels.block_copy import copy_and_checksum_pieces, copy_pieces, memcpy_pieces
from pd_kernels.block_stream import receive_and_checksum_pieces, receive_pieces, send_pieces

READ_ONLY = np.frombuffer(bytes(64), np.uint8)
BUFFERS = {
    "every second byte": np.zeros(128, np.uint8)[::2], "backwards": np.zeros(64, np.uint8)[::-1],
    "wider items": np.zeros(64, np.int64), "signed": np.zeros(64, np.int8), "two dims": np.zeros((1, 64), np.uint8),
}
PLACES = {  # offset, length
    "beyond 64 bits": (2**63 - 8, 16), "the longest": (1, 2**63 - 1), "one byte behind": (0, 65), "before": (-1, 1),
    "of no length": (0, -1),
}
COPIES = [copy_pieces, memcpy_pieces, copy_and_checksum_pieces]


def at(value: int, dtype: type = np.int64) -> np.ndarray:
    return np.array([value], dtype)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.mark.parametrize("buffer", BUFFERS.values(), ids=BUFFERS)
def test_buffers_that_are_not_contiguous_bytes(buffer: np.ndarray, ends: tuple[socket.socket, socket.socket]) -> None:
    right, zero, length = np.zeros(64, np.uint8), at(0), at(8)
    for copy in COPIES:
        for buffers in ((buffer, right), (right, buffer)):
            with pytest.raises(WrongPieces, match=r"must be uint8 \[n\], contiguous"):
                copy(*buffers, zero, zero, length)
    with pytest.raises(WrongPieces, match="the buffer must be"):
        range_checksums(buffer, zero, length)
    with pytest.raises(WrongPieces, match="the source must be"):
        send_pieces(ends[0], buffer, zero, length)
    with pytest.raises(WrongPieces, match="the destination must be"):
        receive_pieces(ends[1], buffer, zero, length, np.zeros(1, np.uint8))


def test_nothing_is_written_to_read_only_bytes(ends: tuple[socket.socket, socket.socket]) -> None:
    source, zero, length = np.full(64, 7, np.uint8), at(0), at(64)
    for copy in COPIES:
        with pytest.raises(WrongPieces, match=r"writeable; got .* read-only"):
            copy(source, READ_ONLY, zero, zero, length)
    for receive in (receive_pieces, receive_and_checksum_pieces):
        with pytest.raises(WrongPieces, match=r"writeable; got .* read-only"):
            receive(ends[1], READ_ONLY, zero, length, np.zeros(1, np.uint8))
    assert not READ_ONLY.any()
    copy_pieces(READ_ONLY, source, zero, zero, length)
    assert not source.any()


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_pieces_that_lie_outside(place: tuple[int, int]) -> None:
    source, destination, offset, length = np.ones(64, np.uint8), np.zeros(64, np.uint8), at(place[0]), at(place[1])
    for copy in COPIES:
        for offsets in ((offset, at(0)), (at(0), offset)):
            with pytest.raises(WrongPieces, match="not within the"):
                copy(source, destination, *offsets, length)
    with pytest.raises(WrongPieces, match="not within the buffer of 64"):
        range_checksums(source, offset, length)
    assert not destination.any()


def test_places_that_are_not_of_64_bits_or_not_as_many() -> None:
    buffer = np.zeros(64, np.uint8)
    for offsets, lengths in (
        (at(2**31 - 8, np.int32), at(16, np.int32)), (at(0), at(1, np.uint64)), (at(0), np.array([1, 2])),
        (at(0)[None], at(1)[None]),
    ):
        with pytest.raises(WrongPieces, match="must be int64, an offset and a length each"):
            range_checksums(buffer, offsets, lengths)


@pytest.mark.parametrize("stop", [
    np.zeros(0, np.uint8), np.zeros(2, np.uint8), np.zeros((1, 1), np.uint8), np.zeros(1, np.int64),
    np.zeros((), np.uint8),
], ids=str)
def test_a_flag_that_is_none(stop: np.ndarray, ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].send(bytes(8))
    destination = np.ones(64, np.uint8)
    for receive in (receive_pieces, receive_and_checksum_pieces):
        with pytest.raises(WrongPieces, match=r"the flag that stops must be uint8 \[1\]; got"):
            receive(ends[1], destination, at(0), at(8), stop)
    assert destination.all()
