"""Which worker holds which cached blocks, as their events tell: one look-up answers for all workers.

A table from block hash to the set of its holders, one bit a worker, and for each worker the set of its blocks, so that
a restart costs what that worker held and no more. A look-up follows a prompt's chained hashes until nobody holds the
next one: at most a step a block, however many workers and blocks there are. Pure: no clock, no socket.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pd_engine.errors import DataLoss
from pd_engine.hashing import HASH_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEvents:
    """How a worker's blocks stand at `sequence`, as far as that has changed since `previous_sequence`.

    Attributes:
        epoch: the life of the worker that speaks.
        is_snapshot: `stored` is all that it holds.
        stored, removed: hashes; none is in both.
    """

    epoch: str
    previous_sequence: int
    sequence: int
    is_snapshot: bool = False
    stored: Collection[bytes] = ()
    removed: Collection[bytes] = ()


class Applied(Enum):
    """What became of a worker's events."""

    IN_ORDER = "taken over"
    GAP = "events before these are missing: nothing was changed, a snapshot is needed"


@dataclass(slots=True)
class _Worker:
    """`bit`: its place in sets of holders."""

    bit: int
    epoch: str
    sequence: int = 0
    is_known: bool = False  # a snapshot of this life has come
    blocks: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """Bounded: entries beyond the bound are left out, which costs a worse placement and nothing else.

    An entry is one block at one worker, and takes about 150 bytes.

    Attributes:
        num_left_out: entries that found the index full, since the beginning.
    """

    def __init__(self, *, max_entries: int) -> None:
        self.num_left_out = 0
        self._max_entries = max_entries
        self._num_entries = 0
        self._holders: dict[bytes, int] = {}
        self._workers: dict[str, _Worker] = {}
        self._worker_of_bit: dict[int, str] = {}

    @property
    def num_entries(self) -> int:
        return self._num_entries

    @property
    def num_blocks(self) -> int:
        """Different blocks."""
        return len(self._holders)

    def num_blocks_at(self, worker_id: str) -> int:
        worker = self._workers.get(worker_id)
        return len(worker.blocks) if worker is not None else 0

    def held(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """By worker, how many leading blocks of a prompt it holds; workers that hold none are left out.

        Args:
            block_hashes: of the prompt's full blocks, in order.
        """
        num_held: dict[str, int] = {}
        everybody = -1
        together = everybody  # hold all blocks so far
        for depth, holders in enumerate(map(self._holders.get, block_hashes, itertools.repeat(0))):
            remaining = together & holders
            if remaining != together:
                if depth:
                    self._note(together ^ remaining, depth, num_held)
                if not remaining:
                    return num_held
                together = remaining
        if together != everybody:
            self._note(together, len(block_hashes), num_held)
        return num_held

    def resume(self, worker_id: str, epoch: str) -> int:
        """The sequence after which events of this life of the worker are wanted; 0: a snapshot first.

        What an earlier life held is forgotten.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.epoch != epoch:
            self.forget(worker_id)
            self._workers[worker_id] = worker = _Worker(self._free_bit(), epoch)
            self._worker_of_bit[worker.bit] = worker_id
        return worker.sequence if worker.is_known else 0

    def apply(self, worker_id: str, events: CacheEvents) -> Applied:
        """Takes events over, in order of sequence.

        Raises:
            DataLoss: what should be a hash is none; nothing was changed.
        """
        for block_hash in (*events.stored, *events.removed):
            if len(block_hash) != HASH_BYTES:
                raise DataLoss(f"worker {worker_id}: a block hash has {HASH_BYTES} bytes, got {len(block_hash)}")
        worker = self._workers.get(worker_id)
        if worker is None or worker.epoch != events.epoch:
            if not events.is_snapshot:
                return Applied.GAP
            self.resume(worker_id, events.epoch)
            worker = self._workers[worker_id]
        if events.is_snapshot:
            stored = set(events.stored)
            self._remove(worker, worker.blocks - stored)
            self._store(worker, stored)
        elif not worker.is_known or worker.sequence != events.previous_sequence:
            return Applied.GAP
        else:
            self._remove(worker, events.removed)
            self._store(worker, events.stored)
        worker.is_known = True
        worker.sequence = events.sequence
        return Applied.IN_ORDER

    def forget(self, worker_id: str) -> None:
        """The worker is gone, or its index with it."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._remove(worker, list(worker.blocks))
            del self._worker_of_bit[worker.bit]

    def _store(self, worker: _Worker, block_hashes: Iterable[bytes]) -> None:
        holders, blocks, bit = self._holders, worker.blocks, worker.bit
        for block_hash in block_hashes:
            if block_hash in blocks:
                continue
            if self._num_entries >= self._max_entries:
                self.num_left_out += 1
                continue
            others = holders.get(block_hash)
            holders[block_hash] = bit if others is None else others | bit
            blocks.add(block_hash)
            self._num_entries += 1

    def _remove(self, worker: _Worker, block_hashes: Iterable[bytes]) -> None:
        holders, blocks = self._holders, worker.blocks
        for block_hash in block_hashes:
            if block_hash not in blocks:
                continue
            blocks.remove(block_hash)
            self._num_entries -= 1
            others = holders[block_hash] ^ worker.bit
            if others:
                holders[block_hash] = others
            else:
                del holders[block_hash]

    def _note(self, bits: int, depth: int, num_held: dict[str, int]) -> None:
        while bits:
            bit = bits & -bits
            num_held[self._worker_of_bit[bit]] = depth
            bits ^= bit

    def _free_bit(self) -> int:
        bit = 1
        while bit in self._worker_of_bit:
            bit <<= 1
        return bit
