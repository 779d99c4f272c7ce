"""Pieces through stream sockets, on every implementation."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_kernels.block_checksum.reference import checksum
from pd_kernels.block_stream import receive_and_checksum_pieces, receive_pieces, send_pieces, stream
from pd_kernels.cpu.native import load_library, usable_isas

GOES_ON = np.zeros(1, dtype=np.uint8)
STOPPED = np.ones(1, dtype=np.uint8)


@pytest.fixture(params=[*usable_isas(), "python"], autouse=True)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled loops of each instruction set, and Python's own calls."""
    library = None if request.param == "python" else load_library(request.param)
    monkeypatch.setattr(stream, "compiled", lambda: library)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


class Pieces:
    """Pieces that lie in one order at the source and in another at the destination, with gaps."""

    def __init__(self, lengths: list[int], *, shift: int = 0) -> None:
        random = np.random.default_rng(7)
        self.lengths = np.array(lengths, dtype=np.int64)
        self.source = random.integers(1, 256, int(self.lengths.sum()) + 3 * len(lengths) + 64, dtype=np.uint8)
        self.destination = np.zeros(len(self.source), dtype=np.uint8)
        self.starts = self._places(random.permutation(len(lengths)), shift)
        self.ends = self._places(random.permutation(len(lengths)), 0)

    @property
    def expected(self) -> bytes:
        """Of the destination, when all has arrived."""
        wanted = np.zeros(len(self.destination), dtype=np.uint8)
        for start, end, length in zip(self.starts, self.ends, self.lengths, strict=True):
            wanted[end : end + length] = self.source[start : start + length]
        return wanted.tobytes()

    @property
    def checksums(self) -> list[int]:
        return [checksum(self.source[start : start + n]) for start, n in zip(self.starts, self.lengths, strict=True)]

    def _places(self, order: np.ndarray, shift: int) -> np.ndarray:
        places = np.zeros(len(order), dtype=np.int64)
        places[order] = shift + np.concatenate([[0], np.cumsum(self.lengths[order] + 3)[:-1]])[: len(order)]
        return places


def travel(ends: tuple[socket.socket, socket.socket], pieces: Pieces, *, checksums: bool) -> list[int]:
    """Sends and receives all pieces; returns the checksums, none if they are off."""
    sender = threading.Thread(target=send_pieces, args=(ends[0], pieces.source, pieces.starts, pieces.lengths))
    sender.start()
    if checksums:
        sums = receive_and_checksum_pieces(ends[1], pieces.destination, pieces.ends, pieces.lengths, GOES_ON).tolist()
    else:
        receive_pieces(ends[1], pieces.destination, pieces.ends, pieces.lengths, GOES_ON)
        sums = []
    sender.join()
    return sums


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 20_000), max_size=12))
@pytest.mark.parametrize("checksums", [False, True])
def test_what_arrives_is_what_was_sent(lengths: list[int], checksums: bool) -> None:
    pieces = Pieces(lengths)
    left, right = socket.socketpair()
    with left, right:
        assert travel((left, right), pieces, checksums=checksums) == (pieces.checksums if checksums else [])
    assert pieces.destination.tobytes() == pieces.expected


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("lengths", [[3_000_001], [18_432] * 700, [4096, 4097, 1, 0, 4095] * 60, [7] * 1500])
def test_long_pieces_and_many_of_them(
    ends: tuple[socket.socket, socket.socket], lengths: list[int], checksums: bool
) -> None:
    """More than one call, one buffer, one stretch of keys can hold."""
    pieces = Pieces(lengths, shift=5)
    assert travel(ends, pieces, checksums=checksums) == (pieces.checksums if checksums else [])
    assert pieces.destination.tobytes() == pieces.expected


@pytest.mark.parametrize("receive", [receive_pieces, receive_and_checksum_pieces])
def test_a_peer_that_hangs_up_is_an_error(ends: tuple[socket.socket, socket.socket], receive: object) -> None:
    pieces = Pieces([10_000, 10_000])
    send_pieces(ends[0], pieces.source, pieces.starts[:1], pieces.lengths[:1])
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="the peer hung up"):
        receive(ends[1], pieces.destination, pieces.ends, pieces.lengths, GOES_ON)  # type: ignore[operator]


@pytest.mark.parametrize("receive", [receive_pieces, receive_and_checksum_pieces])
def test_nothing_is_written_once_stopped(ends: tuple[socket.socket, socket.socket], receive: object) -> None:
    pieces = Pieces([5_000])
    send_pieces(ends[0], pieces.source, pieces.starts, pieces.lengths)
    with pytest.raises(ConnectionResetError):
        receive(ends[1], pieces.destination, pieces.ends, pieces.lengths, STOPPED)  # type: ignore[operator]
    assert not pieces.destination.any()


def test_a_broken_socket_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    pieces = Pieces([5_000_000])
    ends[1].close()
    with pytest.raises(BrokenPipeError):
        send_pieces(ends[0], pieces.source, pieces.starts, pieces.lengths)


@pytest.mark.parametrize(("start", "length"), [(-1, 4), (0, -1), (61, 4)])
def test_pieces_beyond_a_buffer_are_refused(
    ends: tuple[socket.socket, socket.socket], start: int, length: int
) -> None:
    """Before a byte is sent or waited for."""
    memory, starts, lengths = np.zeros(64, dtype=np.uint8), np.array([0, start]), np.array([4, length])
    with pytest.raises(ValueError, match="a piece is not within the source of 64 bytes"):
        send_pieces(ends[0], memory, starts, lengths)
    with pytest.raises(ValueError, match="a piece is not within the destination of 64 bytes"):
        receive_pieces(ends[1], memory, starts, lengths, GOES_ON)
    with pytest.raises(ValueError, match="a piece is not within the destination of 64 bytes"):
        receive_and_checksum_pieces(ends[1], memory, starts, lengths, GOES_ON)
