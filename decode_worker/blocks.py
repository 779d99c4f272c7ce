"""Which of a choice's blocks are here already, and which of them the next choice will find."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.choice_state import ChoiceRecord, ReserveSpec
from kv_transfer.journey import PrefixSource
from kv_transfer.prefix_fetch import PrefixWish
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.chain import Chain
from pd_engine.cache.prefix import PrefixCache
from pd_engine.errors import ResourceExhausted


class ChoiceBlocks:
    """The pool and the prefix cache of a decode worker, as its choices use them. Belongs to the event loop's thread.

    Args:
        cache: None: nothing is held for later.
        with_mtp: the engine has an MTP layer.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache | None, *, with_mtp: bool) -> None:
        self._pool = pool
        self._cache = cache
        self._with_mtp = with_mtp

    def chain(self, spec: ReserveSpec) -> Chain | None:
        if self._cache is None:
            return None
        choice = spec.choice
        return self._cache.chain(choice.token_ids, num_prompt_tokens=choice.num_prompt_tokens, salt=spec.cache_salt)

    def cached(self, spec: ReserveSpec, chain: Chain | None) -> list[int]:
        """Leading blocks that need not be sent; to be held at once. A choice that drafts needs MTP's slots too: what
        lacks them is sent again, which is cheaper than to decode without drafts."""
        if self._cache is None or chain is None or spec.bypass_prefix_cache:
            return []
        return self._cache.match(chain, with_mtp=self._with_mtp and spec.choice.speculate > 0)

    def num_available(self, spec: ReserveSpec, chain: Chain | None, lease_block_ids: Sequence[int]) -> int:
        """Blocks that a reservation can count on: free ones, those of the journey's own earlier lease, and cached ones
        that others hold."""
        own = spec.key.owner
        num_own = sum(set(self._pool.owners(block)) == {own} for block in lease_block_ids)
        num_shared = sum(bool(set(self._pool.owners(block)) - {own}) for block in self.cached(spec, chain))
        return self._pool.num_free + num_own + num_shared

    def handed_over(self, record: ChoiceRecord, block_ids: Sequence[int]) -> int:
        """The handoff is complete: the blocks are the record's, and those of its prompt are found from now on.

        Returns:
            Leading positions whose MTP slots are final: all of them, unless cached blocks lack theirs.
        """
        spec, num_tokens = record.spec, len(record.spec.choice.token_ids)
        record.block_ids = list(block_ids)
        self._pool.transfer(record.block_ids, spec.key.owner, record.name)
        num_mtp = num_tokens if self._with_mtp else 0
        if self._cache is None or record.chain is None:
            return num_mtp
        num_blocks_with_mtp = self._cache.begin(record.chain, record.block_ids)
        lacks_mtp = num_blocks_with_mtp < record.chain.num_stored
        self._cache.store(record.chain, record.block_ids, num_final=num_tokens, num_final_mtp=num_mtp)
        return self._cache.block_size * num_blocks_with_mtp if lacks_mtp else num_mtp

    # One whose prompt is computed here

    def kept(self, record: ChoiceRecord, block_ids: Sequence[int], num_held: int) -> None:
        """The prompt will be computed here: the blocks are the record's, `num_held` leading ones with their contents,
        which are found from now on."""
        record.block_ids = list(block_ids)
        self._pool.transfer(record.block_ids, record.spec.key.owner, record.name)
        record.num_cached_blocks = self._note_held(record, num_held)

    def wish(self, record: ChoiceRecord, holder: PrefixSource | None) -> PrefixWish | None:
        """What one that has its blocks may fetch; None: nothing."""
        spec = record.spec
        if holder is None or record.chain is None or spec.bypass_prefix_cache:
            return None
        return PrefixWish(
            holder=holder, block_hashes=record.chain.hashes, token_ids=spec.choice.token_ids,
            cache_salt=spec.cache_salt, num_held_blocks=record.num_held_blocks,
        )

    def give_up_fresh(self, record: ChoiceRecord) -> None:
        """Of its blocks it keeps those with contents only."""
        self._pool.release(record.block_ids[record.num_held_blocks :], record.name)
        del record.block_ids[record.num_held_blocks :]

    def fetched(self, record: ChoiceRecord, owner: str, block_ids: Sequence[int], num_blocks: int) -> None:
        """These are its blocks, which `owner` hands over, the first `num_blocks` of them with their contents: whoever
        comes now finds those."""
        record.block_ids = list(block_ids)
        self._pool.transfer(record.block_ids, owner, record.name)
        record.num_cached_blocks += num_blocks - record.num_held_blocks
        self._note_held(record, num_blocks)

    def take_again(self, record: ChoiceRecord) -> None:
        """Gives one whose fetch has failed its blocks again: those that the cache still has, and fresh ones.

        Raises:
            ResourceExhausted: there are too few; it holds none then.
        """
        found = self.cached(record.spec, record.chain)
        self._pool.hold(found, record.name)
        try:
            fresh = self._pool.allocate(record.num_blocks - len(found), record.name)
        except ResourceExhausted:
            self._pool.release(found, record.name)
            raise
        record.block_ids = [*found, *fresh]
        num_more = len(found) - record.num_held_blocks
        record.num_cached_blocks = min(len(found), record.num_cached_blocks) + max(0, num_more)
        self._note_held(record, len(found))

    def _note_held(self, record: ChoiceRecord, num_held: int) -> int:
        """So many leading blocks of the record have their contents. Returns how many of them the cache knew."""
        record.num_held_blocks, record.num_held_mtp_blocks = num_held, num_held if self._with_mtp else 0
        if self._cache is None or record.chain is None:
            return 0
        record.chain.num_stored = record.chain.num_stored_mtp = 0
        num_cached_with_mtp = self._cache.begin(record.chain, record.block_ids)
        num_cached = record.chain.num_stored
        # Those that it did not know came from another worker: with all their slots.
        if num_cached_with_mtp < num_cached:
            record.num_held_mtp_blocks = min(record.num_held_mtp_blocks, num_cached_with_mtp)
        num_final = num_held * self._cache.block_size
        self._cache.store(
            record.chain, record.block_ids, num_final=num_final, num_final_mtp=num_final if self._with_mtp else 0
        )
        return num_cached

    def computed(self, record: ChoiceRecord, num_computed: int, num_final_mtp: int) -> None:
        """So many leading tokens of its prompt are done: whoever comes now finds their full blocks."""
        record.num_computed, record.num_final_mtp = num_computed, num_final_mtp
        if self._cache is not None and record.chain is not None and record.block_ids:
            self._cache.store(
                record.chain, record.block_ids, num_final=num_computed, num_final_mtp=num_final_mtp
            )

    def grew(self, record: ChoiceRecord, token_ids: Sequence[int], num_final_mtp: int) -> None:
        """Tokens were sampled: all but the last one have their slots. Blocks that have become full are found from now
        on.

        Args:
            num_final_mtp: leading positions whose MTP slots are final.
        """
        record.num_generated += len(token_ids)
        record.num_final_mtp = num_final_mtp
        if record.chain is not None:
            record.chain.extend(token_ids)
        self._store(record)

    def caught_up(self, record: ChoiceRecord, num_final_mtp: int) -> None:
        """One that was ended has so many leading positions with final MTP slots by now, of its last tokens that were
        not told any more too."""
        record.num_final_mtp = min(num_final_mtp, record.num_tokens - 1)
        self._store(record)

    def release(self, record: ChoiceRecord) -> None:
        """Nobody writes to them any more."""
        self._pool.release(record.block_ids, record.name)
        record.block_ids = []

    # Room for one that grows, and that leaves and comes back

    def extend(self, record: ChoiceRecord, count: int) -> list[int]:
        """More blocks, which must be free."""
        fresh = self._pool.allocate(count, record.name)
        record.block_ids += fresh
        return fresh

    def num_freed(self, block_ids: Sequence[int]) -> int:
        """How many of these would be free without their one holder."""
        return sum(len(self._pool.owners(block)) == 1 for block in block_ids)

    def num_shared(self, record: ChoiceRecord) -> int:
        """Of the blocks that one in host memory would find again, those that others hold."""
        return sum(self._pool.is_held(block) for block in self._found_again(record))

    def take_back(self, record: ChoiceRecord, count: int) -> int:
        """Gives one in host memory `count` blocks, which must be there. Returns how many leading ones hold what they
        should: they are in the cache."""
        found = self._found_again(record)
        self._pool.hold(found, record.name)
        record.block_ids = [*found, *self._pool.allocate(count - len(found), record.name)]
        if self._cache is not None and record.chain is not None:
            record.chain.num_stored = record.chain.num_stored_mtp = 0
            self._cache.begin(record.chain, record.block_ids)
        return len(found)

    def came_back(self, record: ChoiceRecord) -> None:
        """Its blocks hold its latents again: they are found from now on."""
        self._store(record)

    def _found_again(self, record: ChoiceRecord) -> list[int]:
        if self._cache is None or record.chain is None:
            return []
        num_full = (record.num_tokens - 1) // self._cache.block_size
        return self.cached(record.spec, record.chain)[:num_full]

    def _store(self, record: ChoiceRecord) -> None:
        if self._cache is not None and record.chain is not None and record.block_ids:
            self._cache.store(
                record.chain, record.block_ids, num_final=record.num_tokens - 1, num_final_mtp=record.num_final_mtp
            )

    def check_integrity(self) -> None:
        (self._cache or self._pool).check_integrity()
