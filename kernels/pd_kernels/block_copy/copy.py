"""Copying pieces between two buffers: the compiled loop if it is built, else numpy."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pd_kernels.block_copy import reference
from pd_kernels.block_copy.reference import Offsets
from pd_kernels.cpu.native import best_library

Bytes = npt.NDArray[np.uint8]


def copy_pieces(source: Bytes, destination: Bytes, source_offsets: Offsets, destination_offsets: Offsets,
                num_bytes: Offsets) -> None:
    """destination[destination_offsets[i] ...] = source[source_offsets[i] ...], num_bytes[i] long, for each i.

    Lets go of the GIL. Pieces must not overlap in the destination, nor source and destination.

    Args:
        source, destination: one-dimensional, contiguous; `np.frombuffer(mapping, np.uint8)` of a mapped arena.
        source_offsets, destination_offsets, num_bytes: int64, of one length.

    Raises:
        ValueError: a piece is not within its buffer; nothing is copied.
    """
    assert source.ndim == destination.ndim == 1 and len(source_offsets) == len(destination_offsets) == len(num_bytes)
    if len(num_bytes) == 0:
        return
    _check_within("source", len(source), source_offsets, num_bytes)
    _check_within("destination", len(destination), destination_offsets, num_bytes)
    _loop()(source, destination, source_offsets, destination_offsets, num_bytes)


def _check_within(name: str, size: int, offsets: Offsets, num_bytes: Offsets) -> None:
    if int(offsets.min()) < 0 or int(num_bytes.min()) < 0 or int((offsets + num_bytes).max()) > size:
        raise ValueError(f"a piece is not within the {name} of {size} bytes")


@functools.cache
def _loop() -> Callable[[Bytes, Bytes, Offsets, Offsets, Offsets], None]:
    library = best_library()
    if library is None:
        return reference.copy_pieces

    def loop(source: Bytes, destination: Bytes, source_offsets: Offsets, destination_offsets: Offsets,
             num_bytes: Offsets) -> None:
        arrays = [np.ascontiguousarray(array, dtype=np.int64)
                  for array in (source_offsets, destination_offsets, num_bytes)]
        library.pd_copy_pieces(source.ctypes.data, destination.ctypes.data, len(num_bytes),
                               *(array.ctypes.data for array in arrays))

    return loop
