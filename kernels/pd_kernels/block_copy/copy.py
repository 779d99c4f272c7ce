"""Copying pieces between two buffers: the compiled loops if they are built, else numpy."""

from __future__ import annotations

import numpy as np

from pd_kernels.block_checksum.ranges import Bytes, Offsets, as_int64, check_within, compiled
from pd_kernels.block_checksum.reference import U64
from pd_kernels.block_copy import reference


def copy_pieces(source: Bytes, destination: Bytes, source_offsets: Offsets, destination_offsets: Offsets,
                num_bytes: Offsets) -> None:
    """destination[destination_offsets[i] ...] = source[source_offsets[i] ...], num_bytes[i] long, for each i, past the
    caches.

    Lets go of the GIL. Pieces must not overlap in the destination, nor source and destination.

    Args:
        source, destination: one-dimensional, contiguous; `np.frombuffer(mapping, np.uint8)` of a mapped arena.
        source_offsets, destination_offsets, num_bytes: int64, of one length.

    Raises:
        WrongPieces: see `check_within`; nothing is copied.
    """
    _copy("pd_copy_pieces", source, destination, source_offsets, destination_offsets, num_bytes)


def memcpy_pieces(source: Bytes, destination: Bytes, source_offsets: Offsets, destination_offsets: Offsets,
                  num_bytes: Offsets) -> None:
    """The same with the C library's memcpy: what copies are measured by."""
    _copy("pd_memcpy_pieces", source, destination, source_offsets, destination_offsets, num_bytes)


def copy_and_checksum_pieces(source: Bytes, destination: Bytes, source_offsets: Offsets, destination_offsets: Offsets,
                             num_bytes: Offsets) -> U64:
    """The same, in one pass with the checksums of what was written: uint64 [n]. A copy costs as much with them as
    without: it waits for memory, not for arithmetic."""
    _check(source, destination, source_offsets, destination_offsets, num_bytes)
    library = compiled()
    if library is None:
        return reference.copy_and_checksum_pieces(source, destination, source_offsets, destination_offsets, num_bytes)
    arrays = [as_int64(array) for array in (source_offsets, destination_offsets, num_bytes)]
    out = np.empty(len(num_bytes), dtype=np.uint64)
    library.pd_copy_and_checksum_pieces(
        source.ctypes.data, destination.ctypes.data, len(num_bytes), *(array.ctypes.data for array in arrays),
        out.ctypes.data,
    )
    return out


def _copy(function: str, source: Bytes, destination: Bytes, source_offsets: Offsets, destination_offsets: Offsets,
          num_bytes: Offsets) -> None:
    """By a function of the compiled library, or by numpy without one."""
    _check(source, destination, source_offsets, destination_offsets, num_bytes)
    library = compiled()
    if library is None:
        reference.copy_pieces(source, destination, source_offsets, destination_offsets, num_bytes)
        return
    arrays = [as_int64(array) for array in (source_offsets, destination_offsets, num_bytes)]
    getattr(library, function)(
        source.ctypes.data, destination.ctypes.data, len(num_bytes), *(array.ctypes.data for array in arrays)
    )


def _check(source: Bytes, destination: Bytes, source_offsets: Offsets, destination_offsets: Offsets,
           num_bytes: Offsets) -> None:
    check_within("source", source, source_offsets, num_bytes)
    check_within("destination", destination, destination_offsets, num_bytes, is_written=True)
