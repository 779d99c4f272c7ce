"""Latents of sequences that wait for room, in host memory, and the copies there and back: work of the compute thread.

A copy's memory is its own: mapped when the sequence leaves, given back to the operating system when the copy is closed.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode_worker.scheduler import Place
from pd_engine.cache.arena import TORCH_DTYPES, Arena
from pd_engine.cache.layout import CacheLayout
from pd_engine.errors import PdRelayError, ResourceExhausted
from pd_engine.sequence import Sequence

MOVE_BYTES = 32 * 1024 * 1024  # copied between two steps at most, about 10 ms; one block always may be


class HostCopy:
    """Room for the contents of `num_blocks` blocks: of each component [num_blocks, block_size, width].

    Raises:
        ResourceExhausted: the host has no memory for it.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.block_bytes
        try:
            self._map = mmap.mmap(-1, max(1, self.num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ResourceExhausted(f"no {self.num_bytes} bytes of host memory for a sequence: {error}") from None
        with contextlib.suppress(OSError):  # a kernel without huge pages: the first write of each page costs more
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._components: list[Tensor] = []
        offset = 0
        for index, component in enumerate(layout.components):
            count = num_blocks * layout.block_size * component.width
            self._components.append(
                torch.frombuffer(self._map, dtype=TORCH_DTYPES[component.dtype], offset=offset, count=count).view(
                    num_blocks, layout.block_size, component.width
                )
            )
            offset += num_blocks * layout.piece_bytes(index)

    def save(self, arena: Arena, block_ids: Seq[int], start: int, stop: int) -> None:
        """Copies blocks number start..stop-1 of a sequence with these blocks out of the arena."""
        ids = torch.tensor(block_ids[start:stop])
        for component, copy in enumerate(self._components):
            arena.read_blocks(component, ids, out=copy[start:stop])

    def load(self, arena: Arena, block_ids: Seq[int], start: int, stop: int) -> None:
        """The way back."""
        ids = torch.tensor(block_ids[start:stop])
        for component, copy in enumerate(self._components):
            arena.write_blocks(component, ids, copy[start:stop])

    @property
    def is_closed(self) -> bool:
        return self._map.closed

    def close(self) -> None:
        """Gives the memory back. Safe to call twice."""
        self._components = []
        self._map.close()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stored:
    """A sequence in host memory: all there is of it. Whoever has it closes its copy.

    Attributes:
        place: in the batch's order.
    """

    sequence: Sequence
    place: Place
    copy: HostCopy


@dataclass(kw_only=True, slots=True, eq=False)
class _Move:
    """One sequence on its way. `num_done`: leading blocks that need not be copied any more."""

    stored: Stored
    is_out: bool
    num_done: int


@dataclass(kw_only=True, slots=True)
class Moves:
    """Moves that have ended.

    Attributes:
        out: sequences that are in host memory now, without blocks.
        back: sequences whose latents are in the arena again; their copies are closed.
        failed: by name, of sequences that could not be moved and are forgotten.
    """

    out: list[Stored] = field(default_factory=list)
    back: list[Stored] = field(default_factory=list)
    failed: dict[str, PdRelayError] = field(default_factory=dict)


class Mover:
    """Copies between two steps, first come first served, a bounded number of bytes at a time."""

    def __init__(self, arena: Arena, move_bytes: int = MOVE_BYTES) -> None:
        self._arena = arena
        self._blocks_a_time = max(1, move_bytes // arena.layout.block_bytes)
        self._moves: dict[str, _Move] = {}
        self._failed: dict[str, PdRelayError] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._moves or self._failed)

    def move_out(self, sequence: Sequence, place: Place) -> None:
        """Its computed slots are copied; the rest of its blocks holds nothing."""
        layout = self._arena.layout
        try:
            copy = HostCopy(layout, layout.num_blocks_for(sequence.num_computed))
        except ResourceExhausted as error:
            self._failed[sequence.name] = error
            return
        stored = Stored(sequence=sequence, place=place, copy=copy)
        self._moves[sequence.name] = _Move(stored=stored, is_out=True, num_done=0)

    def bring_back(self, stored: Stored, block_ids: Seq[int], num_held: int) -> None:
        """Into these blocks, of which the first `num_held` have their contents already."""
        assert num_held <= stored.copy.num_blocks <= len(block_ids), (num_held, stored.copy.num_blocks, len(block_ids))
        stored.sequence.block_ids = list(block_ids)
        self._moves[stored.sequence.name] = _Move(stored=stored, is_out=False, num_done=num_held)

    def drop(self, name: str) -> None:
        """Forgets a sequence, if it is on its way: nothing is written to its blocks any more."""
        self._failed.pop(name, None)
        move = self._moves.pop(name, None)
        if move is not None:
            move.stored.copy.close()

    def advance(self) -> Moves:
        """Copies the next blocks. Returns what has ended."""
        ended = Moves(failed=self._failed)
        self._failed = {}
        num_left = self._blocks_a_time
        while self._moves and num_left > 0:
            name, move = next(iter(self._moves.items()))
            stop = min(move.stored.copy.num_blocks, move.num_done + num_left)
            num_left -= stop - move.num_done
            self._copy(move, stop)
            if move.num_done == move.stored.copy.num_blocks:
                del self._moves[name]
                self._end(move, ended)
        return ended

    def _copy(self, move: _Move, stop: int) -> None:
        copy_blocks = move.stored.copy.save if move.is_out else move.stored.copy.load
        if stop > move.num_done:
            copy_blocks(self._arena, move.stored.sequence.block_ids, move.num_done, stop)
        move.num_done = stop

    @staticmethod
    def _end(move: _Move, ended: Moves) -> None:
        if move.is_out:
            move.stored.sequence.block_ids = []
            ended.out.append(move.stored)
        else:
            move.stored.copy.close()
            ended.back.append(move.stored)
