"""A simulated worker's prefix cache: blocks by hash, the least recently used going first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pd_router.prefix_index import CacheEvents, PrefixIndex


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """`hashes`: of its full blocks. `given_cached`: tokens that are cached wherever it goes, as a measurement told; in
    place of hashes."""

    num_tokens: int
    hashes: tuple[bytes, ...] = ()
    given_cached: int = 0


class SimulatedCache:
    """Tells an index what it stores and removes. `num_blocks` 0: it keeps nothing."""

    def __init__(self, worker_id: str, index: PrefixIndex, *, num_blocks: int, block_size: int) -> None:
        self._worker_id = worker_id
        self._index = index
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # the next to be evicted first
        self._life = 0
        self._sequence = 0
        self.clear()

    def num_cached(self, prompt: Prompt) -> int:
        """Leading tokens of a prompt that need not be computed; the last one always is."""
        count = 0
        for block_hash in prompt.hashes:
            if block_hash not in self._blocks:
                break
            count += 1
        return min(prompt.num_tokens - 1, max(prompt.given_cached, count * self._block_size))

    def keep(self, prompt: Prompt) -> None:
        if not self._num_blocks:
            return
        new = [block_hash for block_hash in prompt.hashes if block_hash not in self._blocks]
        for block_hash in reversed(prompt.hashes):
            self._blocks[block_hash] = None
            self._blocks.move_to_end(block_hash)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._num_blocks)]
        unknown = set(new)
        stored = [block_hash for block_hash in new if block_hash in self._blocks]
        self._tell(stored, [block_hash for block_hash in removed if block_hash not in unknown])

    def clear(self) -> None:
        """A new life begins."""
        self._blocks.clear()
        self._life += 1
        self._sequence = 1
        self._index.apply(self._worker_id, CacheEvents(
            epoch=str(self._life), previous_sequence=0, sequence=1, is_snapshot=True
        ))

    def _tell(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if not stored and not removed:
            return
        before = self._sequence
        self._sequence += len(stored) + len(removed)
        self._index.apply(self._worker_id, CacheEvents(
            epoch=str(self._life), previous_sequence=before, sequence=self._sequence, stored=stored, removed=removed
        ))
