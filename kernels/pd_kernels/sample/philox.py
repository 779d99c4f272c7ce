"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10
MASK = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)

Words = npt.NDArray[np.uint32]


def philox(counter_4n: npt.NDArray[np.uint32], key: tuple[int, int]) -> Words:
    """Four random words for each of n counters: uint32 [4, n]."""
    c0, c1, c2, c3 = (row.astype(np.uint64) for row in counter_4n)
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product_0, product_1 = c0 * np.uint64(MULTIPLIER_0), c2 * np.uint64(MULTIPLIER_1)
        c0, c1, c2, c3 = (
            (product_1 >> SHIFT) ^ c1 ^ np.uint64(k0),
            product_1 & MASK,
            (product_0 >> SHIFT) ^ c3 ^ np.uint64(k1),
            product_0 & MASK,
        )
        k0, k1 = (k0 + WEYL_0) & 0xFFFFFFFF, (k1 + WEYL_1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def position_words(seed: int, position: int, vocab_size: int) -> Words:
    """The random word of each vocabulary entry at one position of the stream with this seed: uint32 [Z].

    key = (seed low, seed high), counter = (v >> 2, position low, position high, 0), word v & 3: four entries a call.
    """
    num_counters = -(-vocab_size // 4)
    counter = np.zeros((4, num_counters), dtype=np.uint32)
    counter[0] = np.arange(num_counters, dtype=np.uint32)
    counter[1] = position & 0xFFFFFFFF
    counter[2] = position >> 32
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return np.ascontiguousarray(words.T).reshape(-1)[:vocab_size]
