"""Blocks that a transfer may still write to although nobody owns them any more. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pd_engine.cache.blocks import BlockPool


class Quarantine:
    """Keeps blocks out of the pool until every transfer that could write to them has ended."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks_of: dict[int, tuple[int, ...]] = {}  # by number of the fetch
        self._num_fetches: Counter[int] = Counter()       # by block

    @property
    def num_blocks(self) -> int:
        return len(self._num_fetches)

    def put(self, fetches: Mapping[int, Iterable[int]], owner: str) -> None:
        """Takes the blocks of these fetches from `owner`, who holds them alone."""
        for number, blocks in fetches.items():
            self._blocks_of[number] = tuple(set(blocks))
        fresh = set().union(*(self._blocks_of[number] for number in fetches))
        assert not any(block in self._num_fetches for block in fresh), "a block in quarantine had an owner"
        self._pool.quarantine(fresh, owner)
        for number in fetches:
            self._num_fetches.update(self._blocks_of[number])

    def quiesced(self, number: int) -> None:
        """That fetch cannot write any more. Nothing happens if it has no blocks here."""
        for block in self._blocks_of.pop(number, ()):
            self._num_fetches[block] -= 1
            if not self._num_fetches[block]:
                del self._num_fetches[block]
                self._pool.end_quarantine([block])
