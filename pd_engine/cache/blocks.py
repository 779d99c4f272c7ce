"""Who owns which block. Pure bookkeeping: no memory, no torch, no clock.

A block is held by one or more owners, quarantined (nobody may reuse it until a transfer that could still write to it
has ended), kept (nobody holds it, but a prefix cache has a use for its contents until its room is needed) or free.
Every hold names its owner, so that a leak can be told by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pd_engine.errors import ResourceExhausted

Owner = str


class Keeper(Protocol):
    """Who has a use for blocks that nobody holds: a prefix cache."""

    def released(self, block: int) -> bool:
        """Nobody holds the block any more: whether it is to be kept until its room is needed."""
        ...

    def evicted(self, block: int) -> None:
        """A kept block's room was needed: its contents are void from here on."""
        ...


class BlockPool:
    """Blocks 0..num_blocks-1.

    Room is taken from free blocks first, then from kept ones, least recently held first; of blocks that were released
    together the last ones go first, so that of a chain of blocks the deepest goes first.

    Args:
        num_blocks: how many there are.
        on_reuse: called with a block's id just before it is given to a new owner; the arena raises the block's
            generation there, so that a reader of the old contents can tell.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] = lambda block: None) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._kept: dict[int, None] = {}  # the next to be evicted first
        self._owners: dict[int, list[Owner]] = {}
        self._quarantined: set[int] = set()
        self._on_reuse = on_reuse
        self._keeper: Keeper | None = None

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: the kept ones among them."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Blocks that nobody holds and whose contents are still of use."""
        return len(self._kept)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def attach(self, keeper: Keeper) -> None:
        """From now on `keeper` is asked what to keep."""
        assert self._keeper is None, "a pool has one keeper"
        self._keeper = keeper

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self, count: int, owner: Owner) -> list[int]:
        """Gives `count` free blocks to `owner`.

        Raises:
            ResourceExhausted: fewer are free; none is taken.
        """
        if not self.can_allocate(count):
            raise ResourceExhausted(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._on_reuse(block)
            self._owners[block] = [owner]
        return blocks

    def hold(self, blocks: Iterable[int], owner: Owner) -> None:
        """Adds `owner` to blocks that somebody owns or that are kept (a pin, or a shared prefix)."""
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
                self._owners[block] = []
            assert block in self._owners, f"block {block} has no owner to share it with {owner}"
            self._owners[block].append(owner)

    def transfer(self, blocks: Iterable[int], old: Owner, new: Owner) -> None:
        """Hands a hold from one owner to another."""
        for block in blocks:
            owners = self._owners[block]
            owners[owners.index(old)] = new

    def release(self, blocks: Sequence[int], owner: Owner) -> None:
        """Ends one hold of `owner` on each block; a block without holds is free again, or kept. Give the blocks of a
        sequence in order."""
        for block in reversed(blocks):
            owners = self._owners.get(block)
            assert owners is not None and owner in owners, f"block {block} is not held by {owner} but by {owners}"
            owners.remove(owner)
            if not owners:
                del self._owners[block]
                if self._keeper is not None and self._keeper.released(block):
                    self._kept[block] = None
                else:
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

    def is_free(self, block: int) -> bool:
        """Whether it may be given to anybody next, kept ones among them."""
        return block in self._kept or block in self._free

    def owners(self, block: int) -> Sequence[Owner]:
        return tuple(self._owners.get(block, ()))

    def is_held(self, block: int) -> bool:
        return block in self._owners

    def holdings(self) -> dict[Owner, list[int]]:
        """Blocks by owner: what a leak report prints."""
        result: dict[Owner, list[int]] = {}
        for block, owners in self._owners.items():
            for owner in owners:
                result.setdefault(owner, []).append(block)
        return result

    # For the keeper

    def kept(self) -> Sequence[int]:
        """The kept blocks, the next to be evicted first."""
        return tuple(self._kept)

    def discard(self, block: int) -> None:
        """A kept block is of no use any more: it is free."""
        del self._kept[block]
        self._free.append(block)

    def touch(self, block: int) -> None:
        """A kept block counts as held just now: all others are evicted before it."""
        del self._kept[block]
        self._kept[block] = None

    def check_integrity(self) -> None:
        """Every block is in exactly one state."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        states = [*self._free, *self._kept, *self._owners, *self._quarantined]
        assert sorted(states) == list(range(self.num_blocks)), f"not every block is in one state: {sorted(states)}"
        assert all(self._owners.values())
        assert not self._kept or self._keeper is not None, "blocks are kept for nobody"

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block = next(iter(self._kept))
        del self._kept[block]
        assert self._keeper is not None
        self._keeper.evicted(block)
        return block
