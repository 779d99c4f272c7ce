"""Fetches of prompts' beginnings in `room_world`: they are asked for, pulled into a lease's blocks and end as they
like, with blocks in quarantine for some rounds where one breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.prefix_fetch import PrefixWish
from support.room_runner import BLOCK_SIZE, slot_value

if TYPE_CHECKING:
    from decode_worker.blocks import ChoiceBlocks
    from decode_worker.choice_state import ChoiceRecord
    from support.room_world import World


@dataclass(kw_only=True, eq=False)
class Fetch:
    """`block_ids`: of its lease; None while the holder is asked."""

    record: ChoiceRecord
    wish: PrefixWish
    owner: str
    due_round: int
    block_ids: list[int] | None = None


class Fetcher:
    """Stands for `PrefixFetcher` and for the leases of its pulls."""

    def __init__(self, world: World, blocks: ChoiceBlocks) -> None:
        self._world = world
        self._blocks = blocks
        self._fetches: list[Fetch] = []
        self._quarantined: list[tuple[int, list[int]]] = []  # until which round
        self.num_fetched = self.num_broken = 0

    @property
    def is_idle(self) -> bool:
        return not self._fetches and not self._quarantined

    def start(self, record: ChoiceRecord, wish: PrefixWish) -> bool:
        if wish.num_held_blocks >= wish.num_blocks or self._world.random.random() < 0.2:
            return False
        owner = f"fetch {record.name}"
        self._fetches.append(Fetch(record=record, wish=wish, owner=owner, due_round=self._due()))
        return True

    def stop(self, record: ChoiceRecord) -> None:
        for fetch in [fetch for fetch in self._fetches if fetch.record is record]:
            self._fetches.remove(fetch)
            self._break(fetch)

    def advance(self) -> None:
        """One round."""
        for until_round, blocks in [entry for entry in self._quarantined if entry[0] <= self._world.round]:
            self._quarantined.remove((until_round, blocks))
            self._world.pool.end_quarantine(blocks)
        for fetch in [fetch for fetch in self._fetches if fetch.due_round <= self._world.round]:
            if fetch not in self._fetches:
                continue  # stopped by what came of another one
            if self._world.random.random() < 0.3:
                self._fetches.remove(fetch)
                self.num_broken += fetch.block_ids is not None
                self._break(fetch)
                self._world.core.local.fetched(fetch.record)
            elif fetch.block_ids is None:
                self._lend(fetch)
            else:
                self._fetches.remove(fetch)
                self._fill(fetch, fetch.block_ids)

    def _due(self) -> int:
        return self._world.round + self._world.random.randint(0, 2)

    def _lend(self, fetch: Fetch) -> None:
        pool, record = self._world.pool, fetch.record
        self._blocks.give_up_fresh(record)
        pool.hold(record.block_ids, fetch.owner)
        fresh = pool.allocate(record.num_blocks - len(record.block_ids), fetch.owner)
        fetch.block_ids = [*record.block_ids, *fresh]
        self._blocks.release(record)
        fetch.due_round = self._due()

    def _fill(self, fetch: Fetch, block_ids: list[int]) -> None:
        record, wish = fetch.record, fetch.wish
        num_blocks = self._world.random.randint(wish.num_held_blocks + 1, wish.num_blocks)
        token_ids = list(wish.token_ids)
        for position in range(wish.num_held_blocks * BLOCK_SIZE, num_blocks * BLOCK_SIZE):
            self._world.slots.write(block_ids, position, slot_value(token_ids, position))
        self._blocks.fetched(record, fetch.owner, block_ids, num_blocks)
        self.num_fetched += 1
        self._world.core.local.fetched(record)

    def _break(self, fetch: Fetch) -> None:
        """Its lease ends, and something may still write to a part of its fresh blocks."""
        if fetch.block_ids is None:
            return
        num_held = fetch.wish.num_held_blocks
        dirty = [block for block in fetch.block_ids[num_held:] if self._world.random.random() < 0.3]
        self._world.pool.release([block for block in fetch.block_ids if block not in dirty], fetch.owner)
        self._world.pool.quarantine(dirty, fetch.owner)
        for block in dirty:
            self._world.slots.reused(block)
        self._quarantined.append((self._due(), dirty))
