"""Checksums that a drill makes wrong, so that blocks arrive as if they had been corrupted on their way.

Nothing that is computed or kept is touched: the receiver finds that what it got does not fit what was announced, asks
again, and gives up.
"""

from __future__ import annotations

import threading

import numpy as np

from kv_transfer.transport import Bytes, Checksums, Int64s, UInt64s


class SpoiltChecksums:
    """As `checksums`, but for the next pieces that are told to be wrong. Called in a thread of its own.

    Args:
        checksums: the right ones.
    """

    def __init__(self, checksums: Checksums) -> None:
        self._checksums = checksums
        self._lock = threading.Lock()
        self._num_left = 0

    def spoil(self, num_pieces: int) -> int:
        """So many pieces more. Returns how many are to come."""
        with self._lock:
            self._num_left += num_pieces
            return self._num_left

    def __call__(self, buffer: Bytes, offsets: Int64s, lengths: Int64s) -> UInt64s:
        right = self._checksums(buffer, offsets, lengths)
        with self._lock:
            count = min(self._num_left, len(right))
            self._num_left -= count
        if count == 0:
            return right
        wrong = right.copy()
        wrong[:count] ^= np.uint64(1)
        return wrong
