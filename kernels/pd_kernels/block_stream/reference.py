"""Pieces through a blocking stream socket with Python's own calls: the definition, and the path of a host without
compiled ops."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pd_kernels.block_checksum.ranges import Bytes, Offsets, range_checksums
from pd_kernels.block_checksum.reference import U64

MAX_VIEWS = 512  # of one call; the kernel's limit is 1,024
RUN_BYTES = 1024 * 1024  # received between two looks at whether to stop, and checksummed while it is still in a cache


def send_pieces(sock: socket.socket, source: Bytes, offsets: Offsets, num_bytes: Offsets) -> None:
    for start in range(0, len(offsets), MAX_VIEWS):  # views are made while earlier ones travel
        part = slice(start, start + MAX_VIEWS)
        send_views(sock, views_of(source.data, offsets[part], num_bytes[part]))


def receive_pieces(
    sock: socket.socket, destination: Bytes, offsets: Offsets, num_bytes: Offsets, stop: npt.NDArray[np.uint8]
) -> None:
    for run in _runs(num_bytes):
        _receive_run(sock, destination, offsets[run], num_bytes[run], stop)


def receive_and_checksum_pieces(
    sock: socket.socket, destination: Bytes, offsets: Offsets, num_bytes: Offsets, stop: npt.NDArray[np.uint8]
) -> U64:
    sums = [np.empty(0, dtype=np.uint64)]
    for run in _runs(num_bytes):
        _receive_run(sock, destination, offsets[run], num_bytes[run], stop)
        sums.append(range_checksums(destination, offsets[run], num_bytes[run]))
    return np.concatenate(sums)


def views_of(buffer: memoryview, offsets: Offsets, num_bytes: Offsets) -> list[memoryview]:
    """Of ranges of a buffer."""
    ends = (offsets + num_bytes).tolist()
    return [buffer[start:end] for start, end in zip(offsets.tolist(), ends, strict=True)]


def send_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Sends all bytes of all views on a blocking socket."""
    start = 0
    while start < len(views):
        group = views[start : start + MAX_VIEWS]
        sent = sock.sendmsg(group)
        for view in group:
            if sent < view.nbytes:
                sock.sendall(view[sent:])  # the kernel took part of the group: finish this view, go on after it
                start += 1
                break
            sent -= view.nbytes
            start += 1


def receive_views(sock: socket.socket, views: Sequence[memoryview], *, may_end: bool = False) -> bool:
    """Fills all views, none of them empty, on a blocking socket. False: the peer has hung up before the first byte, and
    `may_end`.

    Raises:
        ConnectionResetError: the peer has hung up before the last byte.
    """
    start, is_first = 0, True
    while start < len(views):
        group = list(views[start : start + MAX_VIEWS])
        num_bytes = sock.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]
        if num_bytes == 0:
            if is_first and may_end:
                return False
            raise hung_up()
        is_first = False
        for view in group:
            if num_bytes < view.nbytes:
                if num_bytes:
                    _receive_rest(sock, view[num_bytes:])
                    start += 1
                break
            num_bytes -= view.nbytes
            start += 1
    return True


def hung_up() -> ConnectionResetError:
    """What is raised when the stream ends too early, whichever end has ended it."""
    return ConnectionResetError(errno.ECONNRESET, "the peer hung up")


def _receive_rest(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        num_bytes = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if num_bytes == 0:
            raise hung_up()
        view = view[num_bytes:]


def _receive_run(
    sock: socket.socket, destination: Bytes, offsets: Offsets, num_bytes: Offsets, stop: npt.NDArray[np.uint8]
) -> None:
    if stop[0]:
        raise hung_up()
    filled = num_bytes > 0
    receive_views(sock, views_of(destination.data, offsets[filled], num_bytes[filled]))


def _runs(num_bytes: Offsets) -> list[slice]:
    """Consecutive pieces, about `RUN_BYTES` and at most `MAX_VIEWS` of them at a time."""
    if len(num_bytes) == 0:
        return []
    places = np.arange(len(num_bytes)) // MAX_VIEWS
    numbers = np.cumsum(num_bytes) // RUN_BYTES + places * (int(num_bytes.sum()) // RUN_BYTES + 1)
    cuts = np.flatnonzero(np.diff(numbers)) + 1
    return [slice(start, end) for start, end in itertools.pairwise([0, *cuts.tolist(), len(num_bytes)])]
