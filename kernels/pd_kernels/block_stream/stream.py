"""Pieces through a stream socket that blocks, in order and without anything between them: the compiled loops if they
are built, else Python's own calls. Whoever gives up a transfer shuts the socket down from another thread."""

from __future__ import annotations

import os
import socket

import numpy as np
import numpy.typing as npt

from pd_kernels.block_checksum.ranges import Bytes, Offsets, WrongPieces, as_int64, check_within, compiled
from pd_kernels.block_checksum.reference import U64
from pd_kernels.block_stream import reference
from pd_kernels.block_stream.reference import hung_up


def send_pieces(sock: socket.socket, source: Bytes, offsets: Offsets, num_bytes: Offsets) -> None:
    """source[offsets[i] ...], num_bytes[i] long, for each i. Returns when the kernel has taken over the last byte; lets
    go of the GIL.

    Args:
        source: one-dimensional, contiguous; `np.frombuffer(mapping, np.uint8)` of a mapped arena.
        offsets, num_bytes: int64, of one length.

    Raises:
        WrongPieces: see `check_within`; nothing is sent.
        OSError: the socket is broken, or its timeout for sending has passed.
    """
    check_within("source", source, offsets, num_bytes)
    library = compiled()
    if library is None:
        reference.send_pieces(sock, source, offsets, num_bytes)
        return
    offsets, num_bytes = as_int64(offsets), as_int64(num_bytes)
    _check_result(library.pd_send_pieces(
        sock.fileno(), source.ctypes.data, len(offsets), offsets.ctypes.data, num_bytes.ctypes.data
    ))


def receive_pieces(
    sock: socket.socket, destination: Bytes, offsets: Offsets, num_bytes: Offsets, stop: npt.NDArray[np.uint8]
) -> None:
    """The next bytes of the stream to destination[offsets[i] ...], num_bytes[i] long, for each i. Lets go of the GIL.

    Args:
        stop: uint8 [1]; not zero any more: nothing is waited for, and at most a mebibyte is still written.

    Raises:
        WrongPieces: see `check_within`, or `stop` is something else; nothing is received.
        OSError: the socket is broken, the peer hung up before the last byte, or `stop` is set.
    """
    check_within("destination", destination, offsets, num_bytes, is_written=True)
    _check_stop(stop)
    library = compiled()
    if library is None:
        reference.receive_pieces(sock, destination, offsets, num_bytes, stop)
        return
    offsets, num_bytes = as_int64(offsets), as_int64(num_bytes)
    _check_result(library.pd_receive_pieces(
        sock.fileno(), destination.ctypes.data, len(offsets), offsets.ctypes.data, num_bytes.ctypes.data,
        stop.ctypes.data,
    ))


def receive_and_checksum_pieces(
    sock: socket.socket, destination: Bytes, offsets: Offsets, num_bytes: Offsets, stop: npt.NDArray[np.uint8]
) -> U64:
    """The same, and the checksums of what was written: uint64 [n]."""
    check_within("destination", destination, offsets, num_bytes, is_written=True)
    _check_stop(stop)
    library = compiled()
    if library is None:
        return reference.receive_and_checksum_pieces(sock, destination, offsets, num_bytes, stop)
    offsets, num_bytes = as_int64(offsets), as_int64(num_bytes)
    out = np.empty(len(offsets), dtype=np.uint64)
    _check_result(library.pd_receive_and_checksum_pieces(
        sock.fileno(), destination.ctypes.data, len(offsets), offsets.ctypes.data, num_bytes.ctypes.data,
        stop.ctypes.data, out.ctypes.data,
    ))
    return out


def _check_stop(stop: npt.NDArray[np.uint8]) -> None:
    if stop.dtype != np.uint8 or stop.shape != (1,):
        raise WrongPieces(f"the flag that stops must be uint8 [1]; got {stop.dtype} {list(stop.shape)}")


def _check_result(result: int) -> None:
    """Of a compiled loop: 0, -1 if the stream has ended too early, or an errno."""
    if result < 0:
        raise hung_up()
    if result > 0:
        raise OSError(result, os.strerror(result))
