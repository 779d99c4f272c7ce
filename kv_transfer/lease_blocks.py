"""Which blocks a lease gets, keeps from an earlier attempt, and gives back: at once, or when no fetch can write to them
any more. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.destination_state import LeaseRecord
from kv_transfer.quarantine import Quarantine
from pd_engine.cache.blocks import BlockPool
from pd_engine.errors import ResourceExhausted


class LeaseBlocks:
    """Of all leases of one destination.

    Args:
        pool: where the blocks come from; held under `JourneyKey.owner`.
    """

    def __init__(self, pool: BlockPool, *, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._quarantine = Quarantine(pool)

    @property
    def num_quarantined(self) -> int:
        return self._quarantine.num_blocks

    def hold(self, blocks: Sequence[int], owner: str) -> tuple[int, ...]:
        """Blocks that somebody has, for the owner too."""
        held = tuple(blocks)
        self._pool.hold(held, owner)
        return held

    def complete(self, held: tuple[int, ...], kept: tuple[int, ...], num_blocks: int, owner: str) -> tuple[int, ...]:
        """All blocks of a lease: those that the owner holds, and fresh ones.

        Raises:
            ResourceExhausted: too few are free; the owner holds none then.
        """
        try:
            fresh = self._pool.allocate(num_blocks - len(held) - len(kept), owner)
        except ResourceExhausted:
            self._pool.release([*held, *kept], owner)
            raise
        return (*held, *kept, *fresh)

    def taken_over(
        self, old: LeaseRecord, held: tuple[int, ...], num_tokens: int, num_blocks: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(held blocks, other blocks kept) of the journey's next attempt, held once more by the journey: what the old
        one has verified counts as held if it is more than `held`; what a fetch may still write to is not kept."""
        owner = old.key.owner
        num_reusable = min(old.num_reusable_blocks(), num_tokens // self._block_size)
        in_flight = {block for fetch in old.fetches.values() for block in fetch.block_ids}
        free = [block for block in old.block_ids[old.num_held_blocks :] if block not in in_flight]
        if num_reusable > len(held):
            self._pool.release(held, owner)
            held = self.hold(old.block_ids[:num_reusable], owner)
            free = [block for block in free if block not in held]
        kept = self.hold(free[: num_blocks - len(held)], owner)
        return held, kept

    def give_back(self, lease: LeaseRecord) -> None:
        """Frees the blocks of an ended lease; those with a fetch in flight are quarantined until it has ended."""
        unsafe = {number: fetch.block_ids for number, fetch in lease.fetches.items()}
        dirty = {block for blocks in unsafe.values() for block in blocks}
        self._pool.release([block for block in lease.block_ids if block not in dirty], lease.key.owner)
        self._quarantine.put(unsafe, lease.key.owner)

    def quiesced(self, number: int) -> None:
        """That fetch cannot write any more."""
        self._quarantine.quiesced(number)
