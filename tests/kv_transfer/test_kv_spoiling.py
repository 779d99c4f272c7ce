"""What a drill spoils is what it asks for, and nothing that is kept."""

from __future__ import annotations

import numpy as np

from kv_transfer.spoiling import SpoiltChecksums
from pd_kernels.block_checksum.ranges import range_checksums


def test_so_many_checksums_are_wrong_and_the_buffer_is_as_it_was() -> None:
    buffer = np.arange(96, dtype=np.uint8)
    ranges = (np.array([0, 32, 64]), np.array([32, 32, 32]))
    right, spoilt = range_checksums(buffer, *ranges), SpoiltChecksums(range_checksums)
    assert (spoilt(buffer, *ranges) == right).all()
    assert (spoilt.spoil(2), spoilt.spoil(2)) == (2, 4)
    assert (spoilt(buffer, *ranges) != right).all()
    assert spoilt.spoil(0) == 1
    assert (spoilt(buffer, *ranges) != right).tolist() == [True, False, False]
    assert (spoilt(buffer, *ranges) == right).all()
    assert (buffer == np.arange(96, dtype=np.uint8)).all()
    assert spoilt.spoil(0) == 0
