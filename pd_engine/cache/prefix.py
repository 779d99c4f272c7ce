"""Blocks that outlive the sequence that computed them, found again by the tokens up to their end. Pure bookkeeping.

The owner's side of a sequence: `chain` for its tokens, `match` for the leading blocks that are there (hold them, then
allocate the others), `begin` with all its blocks, `store` whenever more positions are final. Releasing the blocks in
the pool is all that is needed at the end: what the cache knows is kept until its room is needed.

A block's contents are a function of the tokens up to its end, so two sequences that computed the same ones hold two
*copies*. Of copies that nobody holds only the best one is kept, and none beside one as good that somebody holds. Every
holder of a block holds a copy of each block before it. Both together make that a block leaves the cache before the one
it follows: what is stored can always be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.chain import Chain, HashBlock
from pd_engine.cache.events import CacheLog
from pd_engine.hashing import extend_packed_hash, root_hash


@dataclass(kw_only=True, slots=True, eq=False)
class _Entry:
    """One stored hash.

    Attributes:
        is_first: of its sequence: then there is no block before it.
        parent, tokens: what the hash is of, the tokens packed: compared on a hit.
        copies: blocks with these contents, and whether their MTP slots are final (always so for the main layers').
    """

    block_hash: bytes
    is_first: bool
    parent: bytes
    tokens: bytes
    copies: dict[int, bool] = field(default_factory=dict)


class PrefixCache:
    """What a worker has computed and may use again.

    Args:
        pool: of the blocks; keeps what is stored here while it has room.
        fingerprint: of the engine: what else a block's contents depend on.
        prompts_only: only blocks within the prompt are shared: where generated positions have another arithmetic.

    Attributes:
        block_size: tokens a block.
        log: of what is stored and removed.
    """

    def __init__(
        self, pool: BlockPool, *, fingerprint: str, block_size: int, prompts_only: bool = False,
        log: CacheLog | None = None, hash_block: HashBlock = extend_packed_hash,
    ) -> None:
        self.log = log or CacheLog()
        self._pool = pool
        self._fingerprint = fingerprint
        self.block_size = block_size
        self._prompts_only = prompts_only
        self._hash_block = hash_block
        self._entries: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        pool.attach(self)

    def chain(self, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str = "") -> Chain:
        """A sequence's tokens by blocks.

        Args:
            salt: sequences with different ones share nothing.
        """
        chain = Chain(
            root_hash(self._fingerprint, salt), block_size=self.block_size,
            max_tokens=num_prompt_tokens if self._prompts_only else None, hash_block=self._hash_block,
        )
        chain.extend(token_ids)
        return chain

    def match(self, chain: Chain, *, with_mtp: bool) -> list[int]:
        """The longest run of leading blocks of the chain that are stored: one block each, in order. Held by nobody for
        it yet: hold them before anything else is allocated.

        Args:
            with_mtp: only blocks whose MTP slots are final as well.
        """
        blocks: list[int] = []
        for index in range(chain.num_blocks):
            entry = self._entry(chain, index)
            if entry is None:
                break
            best = max(entry.copies, key=lambda block: (entry.copies[block], self._pool.is_held(block)))
            if with_mtp and not entry.copies[best]:
                break
            blocks.append(best)
        return blocks

    def begin(self, chain: Chain, block_ids: Sequence[int]) -> int:
        """The chain's sequence has these blocks, in order; those that the cache knows already need not be stored.

        Returns:
            How many leading ones of these have final MTP slots.
        """
        num_with_mtp = 0
        for index, block in zip(range(chain.num_blocks), block_ids, strict=False):
            entry = self._entry(chain, index)
            if entry is None or block not in entry.copies:
                break
            if entry.copies[block] and num_with_mtp == index:
                num_with_mtp += 1
            chain.num_stored = chain.num_stored_mtp = index + 1
        return num_with_mtp

    def store(self, chain: Chain, block_ids: Sequence[int], *, num_final: int, num_final_mtp: int) -> None:
        """Puts in the sequence's full blocks that are not there yet.

        Args:
            block_ids: of the sequence, held by it from the first one on.
            num_final, num_final_mtp: leading positions whose slots are final in the main layers, in MTP's layer.
        """
        for index in range(chain.num_stored, min(num_final // self.block_size, chain.num_blocks)):
            if not self._put(chain, index, block_ids[index]):
                break
            chain.num_stored = index + 1
        for index in range(chain.num_stored_mtp, min(num_final_mtp // self.block_size, chain.num_stored)):
            entry = self._by_block[block_ids[index]]
            entry.copies[block_ids[index]] = True
            self._drop_needless(entry)
            chain.num_stored_mtp = index + 1

    # The pool's keeper

    def released(self, block: int) -> bool:
        entry = self._by_block.get(block)
        if entry is None:
            return False
        as_good = self._as_good(entry, block)
        if as_good:
            self._forget(block)
            for other in as_good:
                if not self._pool.is_held(other):
                    self._pool.touch(other)
            return False
        for other in [other for other in entry.copies if other != block and not self._pool.is_held(other)]:
            self._forget(other)
            self._pool.discard(other)
        return True

    def evicted(self, block: int) -> None:
        self._forget(block)

    def check_integrity(self) -> None:
        """The cache's books agree with themselves and with the pool's, whose own are checked too."""
        pool, entries = self._pool, self._entries
        pool.check_integrity()
        for block_hash, entry in entries.items():
            assert block_hash == entry.block_hash and entry.copies, entry
            assert entry.is_first or entry.parent in entries, f"the block before it is gone: {entry}"
            for block in entry.copies:
                assert pool.is_held(block) or not self._as_good(entry, block), f"block {block} is kept for nothing"
        copies = [block for entry in entries.values() for block in entry.copies]
        assert sorted(copies) == sorted(self._by_block), "a block is stored under two hashes"
        assert {block for block in copies if not pool.is_held(block)} == set(pool.kept()), "kept is not what is stored"
        assert set(self.log.hashes) == set(entries), "events and entries disagree"

    # Inside

    def _entry(self, chain: Chain, index: int) -> _Entry | None:
        """Of the chain's block `index`, verified."""
        entry = self._entries.get(chain.hashes[index])
        if entry is None or (entry.parent, entry.tokens) != (chain.parent(index), chain.tokens(index)):
            return None
        return entry

    def _put(self, chain: Chain, index: int, block: int) -> bool:
        """Stores one block, its MTP slots not final. False: the hash stands for other tokens, or the block before it is
        not stored; then it stays out."""
        assert self._pool.is_held(block) and block not in self._by_block, (block, self._by_block.get(block))
        block_hash = chain.hashes[index]
        entry = self._entry(chain, index)
        if entry is None:
            if block_hash in self._entries:
                return False
            entry = self._entries[block_hash] = _Entry(
                block_hash=block_hash, is_first=index == 0, parent=chain.parent(index),
                tokens=chain.tokens(index),
            )
            self.log.stored(block_hash)
        entry.copies[block] = False
        self._by_block[block] = entry
        self._drop_needless(entry)
        return True

    def _forget(self, block: int) -> None:
        entry = self._by_block.pop(block)
        del entry.copies[block]
        if not entry.copies:
            del self._entries[entry.block_hash]
            self.log.removed(entry.block_hash)

    def _as_good(self, entry: _Entry, block: int) -> list[int]:
        """Other copies that are at least as good as this one."""
        return [other for other in entry.copies if other != block and entry.copies[other] >= entry.copies[block]]

    def _drop_needless(self, entry: _Entry) -> None:
        """Frees copies that nobody holds where another one is as good."""
        for block in list(entry.copies):
            if not self._pool.is_held(block) and self._as_good(entry, block):
                self._forget(block)
                self._pool.discard(block)
