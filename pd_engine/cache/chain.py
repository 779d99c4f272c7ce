"""One sequence by its full blocks: what a prefix cache knows them by. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_engine.hashing import TOKEN_BYTES, extend_packed_hash, pack_tokens

HashBlock = Callable[[bytes, bytes], bytes]


class Chain:
    """Tokens and hashes of a sequence's full blocks; grows with it. `PrefixCache.chain` makes one.

    Args:
        root: the hash before the first block.
        max_tokens: leading tokens that may be shared; None: all.
        hash_block: (hash before, tokens of the block as `pack_tokens` gives them) -> its hash.

    Attributes:
        hashes: of the full blocks that may be shared, in order.
        num_stored: leading blocks that are in the cache because of this sequence, or were there before.
        num_stored_mtp: leading blocks of which it is settled whether their MTP slots are final.
    """

    def __init__(
        self, root: bytes, *, block_size: int, max_tokens: int | None = None, hash_block: HashBlock = extend_packed_hash
    ) -> None:
        self.hashes: list[bytes] = []
        self.num_stored = 0
        self.num_stored_mtp = 0
        self._root = root
        self._block_bytes = block_size * TOKEN_BYTES
        self._max_bytes = None if max_tokens is None else max_tokens * TOKEN_BYTES
        self._hash_block = hash_block
        self._packed = bytearray()

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these tokens."""
        self._packed += pack_tokens(token_ids)
        if self._max_bytes is not None:
            del self._packed[self._max_bytes :]
        for index in range(len(self.hashes), len(self._packed) // self._block_bytes):
            self.hashes.append(self._hash_block(self.parent(index), self.tokens(index)))

    def parent(self, index: int) -> bytes:
        """The hash before block `index`."""
        return self.hashes[index - 1] if index else self._root

    def tokens(self, index: int) -> bytes:
        """Of block `index`, packed."""
        return bytes(self._packed[index * self._block_bytes : (index + 1) * self._block_bytes])
