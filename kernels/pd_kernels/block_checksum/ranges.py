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
        WrongPieces: see `check_within`.
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


class WrongPieces(ValueError):
    """A buffer, or places in it, that a loop over pieces cannot take; the message says what it is."""


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


def check_within(name: str, buffer: Bytes, offsets: Offsets, num_bytes: Offsets, *, is_written: bool = False) -> None:
    """Raises:
    WrongPieces: the buffer of that name is not contiguous bytes, or read-only and to be written; offsets are not int64,
        or not as many as lengths; or a range is not within the buffer.
    """
    if not (buffer.dtype == np.uint8 and buffer.ndim == 1 and buffer.flags.c_contiguous
            and (buffer.flags.writeable or not is_written)):
        raise WrongPieces(f"the {name} must be uint8 [n], contiguous{', writeable' if is_written else ''}; got "
                          f"{buffer.dtype} {list(buffer.shape)}, strides in bytes {buffer.strides}, "
                          f"{'writeable' if buffer.flags.writeable else 'read-only'}")
    if not (offsets.dtype == num_bytes.dtype == np.int64 and offsets.ndim == 1 and offsets.shape == num_bytes.shape):
        raise WrongPieces(f"pieces of the {name} must be int64, an offset and a length each; got {offsets.dtype} "
                          f"{list(offsets.shape)} and {num_bytes.dtype} {list(num_bytes.shape)}")
    if len(offsets) == 0:
        return
    # an offset and a length may add up to more than 64 bits hold
    if offsets.min() < 0 or num_bytes.min() < 0 or (offsets > len(buffer) - num_bytes).any():
        raise WrongPieces(f"a piece is not within the {name} of {len(buffer)} bytes")


def as_int64(values: Offsets) -> Offsets:
    """Contiguous, for C++."""
    return np.ascontiguousarray(values, dtype=np.int64)
