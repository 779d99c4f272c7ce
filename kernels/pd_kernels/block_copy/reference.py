"""Copying pieces between two buffers with numpy: the definition, and the path of a host without compiled ops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


def copy_pieces(source: npt.NDArray[np.uint8], destination: npt.NDArray[np.uint8], source_offsets: Offsets,
                destination_offsets: Offsets, num_bytes: Offsets) -> None:
    """destination[destination_offsets[i] ...] = source[source_offsets[i] ...], num_bytes[i] long, for each i."""
    for start, end, length in zip(
        source_offsets.tolist(), destination_offsets.tolist(), num_bytes.tolist(), strict=True
    ):
        destination[end : end + length] = source[start : start + length]
