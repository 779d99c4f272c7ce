"""The identity of cached blocks: a hash chained over fingerprint, salt and tokens. Defined here and nowhere else.

    h_{-1} = blake2b-128(fingerprint || 0x00 || salt)
    h_b    = blake2b-128(h_{b-1} || tokens of block b as little-endian uint32)

Only full blocks have a hash. The hash is cryptographic, so one tenant cannot craft a block that another one hits;
a holder compares the tokens on a hit all the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
TOKEN_BYTES = 4
DEFAULT_BLOCK_SIZE = 16  # tokens a block


def root_hash(fingerprint: str, salt: str) -> bytes:
    """The hash before the first block. `fingerprint` is hexadecimal; `salt` separates tenants."""
    return hashlib.blake2b(fingerprint.encode() + b"\x00" + salt.encode(), digest_size=HASH_BYTES).digest()


def block_hashes(
    token_ids: Sequence[int], *, fingerprint: str, salt: str = "", block_size: int = DEFAULT_BLOCK_SIZE
) -> list[bytes]:
    """Hashes of the full blocks of a token sequence, in order: `len(token_ids) // block_size` of 16 bytes each."""
    parent = root_hash(fingerprint, salt)
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = extend_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def extend_hash(parent: bytes, block_token_ids: Sequence[int]) -> bytes:
    """The hash of the block with these tokens that follows the block with hash `parent`."""
    return extend_packed_hash(parent, pack_tokens(block_token_ids))


def extend_packed_hash(parent: bytes, block: bytes) -> bytes:
    """`extend_hash` of tokens that `pack_tokens` has packed."""
    return hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32, `TOKEN_BYTES` a token."""
    words = array("I", token_ids)
    assert words.itemsize == TOKEN_BYTES, words.itemsize
    return words.tobytes()
