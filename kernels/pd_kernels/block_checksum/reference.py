"""The checksum of a piece: multilinear over 32-bit words, modulo 2^64.

    words:   the bytes, padded with zeros to a multiple of 4, as little-endian uint32
    key_i:   splitmix64(i) | 1, for i = 0..1023: as many as stay in a core's nearest cache
    weight:  of word i: key_(i mod 1024) · RATIO^(i div 1024)
    sum:     Σ_i word_i · weight_i  mod 2^64       (no order: any number of lanes or threads may share it)
    result:  mix(sum + num_bytes · LENGTH_KEY mod 2^64)

What it detects: a change within one word always (an odd weight times a non-zero difference below 2^32 is not 0); two
words of the same key exchanged always (powers of RATIO that are d apart differ by an odd number times 4 · the power of
two in d); words moved, swapped or torn between two versions, zeroed ranges and other damage with probability 1 - 2^-64
when it has no relation to the keys; a changed length with the same prefix likewise. It is no defence against somebody
who chooses the damage. `mix` (the finalizer of splitmix64, a bijection) only spreads the bits.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

NUM_KEYS = 1024
RATIO = 0x27D4EB2F165667C5  # 5 modulo 8
LENGTH_KEY = 0xC2B2AE3D27D4EB4F
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1

U64 = npt.NDArray[np.uint64]


def mix(x: int) -> int:
    """The finalizer of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@functools.cache
def keys() -> U64:
    """uint64 [NUM_KEYS]: splitmix64's outputs from state 0, made odd."""
    x = np.arange(1, NUM_KEYS + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def checksum(piece: memoryview | bytes | npt.NDArray[np.uint8]) -> int:
    """The checksum of the bytes of one piece, of any length."""
    octets = np.frombuffer(piece, dtype=np.uint8)
    words = np.zeros((-(-len(octets) // (4 * NUM_KEYS)), NUM_KEYS), dtype="<u4")
    words.reshape(-1).view(np.uint8)[: len(octets)] = octets
    sums = (words.astype(np.uint64) * keys()).sum(axis=1, dtype=np.uint64)
    total = sum(value * pow(RATIO, stretch, 1 << 64) for stretch, value in enumerate(sums.tolist()))
    return mix((total + len(octets) * LENGTH_KEY) & MASK)


def block_checksums(pieces: list[memoryview]) -> U64:
    """One checksum a piece."""
    return np.array([checksum(piece) for piece in pieces], dtype=np.uint64)
