"""Who owns which block. Pure bookkeeping: no memory, no torch, no clock.

A block is free, held by one or more owners, or quarantined (nobody may reuse it until a transfer that could still
write to it has ended). Every hold names its owner, so that a leak can be told by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pd_engine.errors import ResourceExhausted

Owner = str


class BlockPool:
    """Blocks 0..num_blocks-1.

    Args:
        num_blocks: how many there are.
        on_reuse: called with a block's id just before it is given to a new owner; the arena raises the block's
            generation there, so that a reader of the old contents can tell.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] = lambda block: None) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._owners: dict[int, list[Owner]] = {}
        self._quarantined: set[int] = set()
        self._on_reuse = on_reuse

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int, owner: Owner) -> list[int]:
        """Gives `count` free blocks to `owner`.

        Raises:
            ResourceExhausted: fewer are free; none is taken.
        """
        if not self.can_allocate(count):
            raise ResourceExhausted(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._on_reuse(block)
            self._owners[block] = [owner]
        return blocks

    def hold(self, blocks: Iterable[int], owner: Owner) -> None:
        """Adds `owner` to blocks that somebody already owns (a pin, or a shared prefix)."""
        for block in blocks:
            assert block in self._owners, f"block {block} has no owner to share it with {owner}"
            self._owners[block].append(owner)

    def transfer(self, blocks: Iterable[int], old: Owner, new: Owner) -> None:
        """Hands a hold from one owner to another."""
        for block in blocks:
            owners = self._owners[block]
            owners[owners.index(old)] = new

    def release(self, blocks: Iterable[int], owner: Owner) -> None:
        """Ends one hold of `owner` on each block; a block without holds is free again."""
        for block in blocks:
            owners = self._owners.get(block)
            assert owners is not None and owner in owners, f"block {block} is not held by {owner} but by {owners}"
            owners.remove(owner)
            if not owners:
                del self._owners[block]
                self._free.append(block)

    def quarantine(self, blocks: Iterable[int], owner: Owner) -> None:
        """Like `release`, but the blocks, which `owner` must hold alone, stay out of use until `end_quarantine`."""
        for block in blocks:
            assert self._owners.get(block) == [owner], f"block {block}: {self._owners.get(block)}, not {owner} alone"
            del self._owners[block]
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._quarantined.remove(block)
            self._free.append(block)

    def owners(self, block: int) -> Sequence[Owner]:
        return tuple(self._owners.get(block, ()))

    def holdings(self) -> dict[Owner, list[int]]:
        """Blocks by owner: what a leak report prints."""
        result: dict[Owner, list[int]] = {}
        for block, owners in self._owners.items():
            for owner in owners:
                result.setdefault(owner, []).append(block)
        return result

    def check_integrity(self) -> None:
        """Every block is in exactly one state."""
        free, held = set(self._free), set(self._owners)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held and not free & self._quarantined and not held & self._quarantined
        assert len(free) + len(held) + len(self._quarantined) == self.num_blocks
        assert all(self._owners.values())
