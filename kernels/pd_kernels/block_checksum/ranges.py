"""Checksums of ranges of one buffer: compiled if it is built, else numpy."""

from __future__ import annotations

import ctypes
import functools
import logging

import numpy as np
import numpy.typing as npt

from pd_kernels.block_checksum.reference import U64, checksum
from pd_kernels.cpu.native import LibraryUnusable, best_library

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


def range_checksums(buffer: Bytes, offsets: Offsets, num_bytes: Offsets) -> U64:
    """uint64 [n]: of buffer[offsets[i] ...], num_bytes[i] long, for each i. Lets go of the GIL.

    Args:
        buffer: one-dimensional, contiguous; `np.frombuffer(mapping, np.uint8)` of a mapped arena.
        offsets, num_bytes: int64 [n].

    Raises:
        ValueError: a range is not within the buffer.
    """
    check_within("buffer", buffer, offsets, num_bytes)
    library = compiled()
    if library is None:
        ranges = zip(offsets.tolist(), num_bytes.tolist(), strict=True)
        return np.array([checksum(buffer[start : start + length]) for start, length in ranges], dtype=np.uint64)
    out = np.empty(len(offsets), dtype=np.uint64)
    offsets, num_bytes = as_int64(offsets), as_int64(num_bytes)
    library.pd_checksums(
        buffer.ctypes.data, len(offsets), offsets.ctypes.data, num_bytes.ctypes.data, out.ctypes.data
    )
    return out


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """`best_library`, looked for once: that takes longer than a small copy.

    Processes whose settings ask for compiled ops have refused a library that cannot be used; the others do without, and
    say so.
    """
    try:
        return best_library()
    except LibraryUnusable as error:
        log.warning("checksums and copies of blocks run in numpy: %s", error)
        return None


def check_within(name: str, buffer: Bytes, offsets: Offsets, num_bytes: Offsets) -> None:
    """Raises: ValueError: a range is not within the buffer of that name."""
    assert buffer.ndim == 1 and len(offsets) == len(num_bytes), (buffer.shape, len(offsets), len(num_bytes))
    if len(offsets) == 0:
        return
    if offsets.min() < 0 or num_bytes.min() < 0 or (offsets + num_bytes).max() > len(buffer):
        raise ValueError(f"a piece is not within the {name} of {len(buffer)} bytes")


def as_int64(values: Offsets) -> Offsets:
    """Contiguous, for C++."""
    return np.ascontiguousarray(values, dtype=np.int64)
