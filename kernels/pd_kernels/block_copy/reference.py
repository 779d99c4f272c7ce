"""Copying pieces between two buffers with numpy: the definition, and the path of a host without compiled ops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pd_kernels.block_checksum.reference import U64, checksum

Offsets = npt.NDArray[np.int64]


def copy_pieces(source: npt.NDArray[np.uint8], destination: npt.NDArray[np.uint8], source_offsets: Offsets,
                destination_offsets: Offsets, num_bytes: Offsets) -> None:
    """destination[destination_offsets[i] ...] = source[source_offsets[i] ...], num_bytes[i] long, for each i."""
    for start, end, length in zip(
        source_offsets.tolist(), destination_offsets.tolist(), num_bytes.tolist(), strict=True
    ):
        destination[end : end + length] = source[start : start + length]


def copy_and_checksum_pieces(
    source: npt.NDArray[np.uint8], destination: npt.NDArray[np.uint8], source_offsets: Offsets,
    destination_offsets: Offsets, num_bytes: Offsets,
) -> U64:
    """The same, and the checksum of each piece as it was written: uint64 [n]."""
    copy_pieces(source, destination, source_offsets, destination_offsets, num_bytes)
    ends = zip(destination_offsets.tolist(), num_bytes.tolist(), strict=True)
    return np.array([checksum(destination[end : end + length]) for end, length in ends], dtype=np.uint64)
