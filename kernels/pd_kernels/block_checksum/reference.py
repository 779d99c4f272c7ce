"""The checksum of a piece: multilinear over 32-bit words, modulo 2^64.

    words:   the bytes, padded with zeros to a multiple of 4, as little-endian uint32
    key_i:   splitmix64(i) | 1
    sum:     Σ_i word_i · key_i  mod 2^64          (no order: any number of lanes or threads may share it)
    result:  mix(sum + num_bytes · LENGTH_KEY mod 2^64)

What it detects: a change within one word always (an odd key times a non-zero difference below 2^32 is not 0);
words moved, swapped or torn between two versions, zeroed ranges and other damage with probability 1 - 2^-64 when it
has no relation to the keys; a changed length with the same prefix likewise. It is no defence against somebody who
chooses the damage. `mix` (the finalizer of splitmix64, a bijection) only spreads the bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LENGTH_KEY = 0xC2B2AE3D27D4EB4F
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1

U64 = npt.NDArray[np.uint64]


def mix(x: int) -> int:
    """The finalizer of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def keys(num_words: int) -> U64:
    """key_0 .. key_(num_words - 1): splitmix64's outputs from state 0, made odd."""
    x = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def checksum(piece: memoryview | bytes) -> int:
    """The checksum of the bytes of one piece, of any length."""
    return checksum_with_keys(piece, keys(-(-memoryview(piece).nbytes // 4)))


def checksum_with_keys(piece: memoryview | bytes, keys_n: U64) -> int:
    """The same, with the keys at hand."""
    octets = np.frombuffer(piece, dtype=np.uint8)
    whole = len(octets) // 4
    words = np.frombuffer(piece, dtype="<u4", count=whole)
    total = int((words.astype(np.uint64) * keys_n[:whole]).sum(dtype=np.uint64))
    tail = int.from_bytes(octets[whole * 4 :].tobytes(), "little")
    if tail:
        total += tail * int(keys_n[whole])
    return mix((total + len(octets) * LENGTH_KEY) & MASK)


def block_checksums(pieces: list[memoryview]) -> U64:
    """One checksum a piece."""
    longest = max((piece.nbytes for piece in pieces), default=0)
    keys_n = keys(-(-longest // 4))
    return np.array([checksum_with_keys(piece, keys_n) for piece in pieces], dtype=np.uint64)
