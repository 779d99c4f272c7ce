"""A block pool that says when it has changed: it is checked after every event that changed it, and need not be after
the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pd_engine.cache.blocks import BlockPool, Owner


class WatchedPool(BlockPool):
    """Attributes:
    has_changed: since whoever looks at it has last taken note.
    """

    has_changed = True

    def allocate(self, count: int, owner: Owner) -> list[int]:
        self.has_changed = True
        return super().allocate(count, owner)

    def hold(self, blocks: Iterable[int], owner: Owner) -> None:
        self.has_changed = True
        super().hold(blocks, owner)

    def transfer(self, blocks: Iterable[int], old: Owner, new: Owner) -> None:
        self.has_changed = True
        super().transfer(blocks, old, new)

    def release(self, blocks: Sequence[int], owner: Owner) -> None:
        self.has_changed = True
        super().release(blocks, owner)

    def quarantine(self, blocks: Iterable[int], owner: Owner) -> None:
        self.has_changed = True
        super().quarantine(blocks, owner)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        self.has_changed = True
        super().end_quarantine(blocks)

    def discard(self, block: int) -> None:
        self.has_changed = True
        super().discard(block)

    def touch(self, block: int) -> None:
        self.has_changed = True
        super().touch(block)
