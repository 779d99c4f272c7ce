"""The prefix index against a plain model, under any order of events, lost messages, restarts and departures."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pd_engine.hashing import block_hashes
from pd_router.prefix_index import Applied, CacheEvents, PrefixIndex

QUICK = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
LONG = settings(QUICK, max_examples=1_500)

# Prompts that share beginnings, as conversations do.
TRUNK = list(range(16 * 4))
PROMPTS = [block_hashes([*TRUNK[: 16 * shared], *range(1000 + shared, 1048 + shared)], fingerprint="ab")
           for shared in range(5)]
HASHES = sorted({block_hash for prompt in PROMPTS for block_hash in prompt})

WORKERS = st.sampled_from(["a", "b", "c"])
SOME = st.sets(st.sampled_from(HASHES))


@dataclass
class Worker:
    """A worker's side: what it holds, and up to where its reader has heard of it.

    Attributes:
        told: its blocks as the reader must know them, None before a snapshot of this life.
        told_sequence: as of when.
    """

    life: int = 0
    sequence: int = 0
    blocks: set[bytes] = field(default_factory=set)
    told: set[bytes] | None = None
    told_sequence: int = 0

    @property
    def epoch(self) -> str:
        return f"life {self.life}"


class IndexMachine(RuleBasedStateMachine):
    max_entries = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_entries=self.max_entries)
        self.workers: dict[str, Worker] = {}

    @rule(worker_id=WORKERS, stored=SOME, removed=SOME, lost=st.booleans())
    def change(self, worker_id: str, stored: set[bytes], removed: set[bytes], lost: bool) -> None:
        """A worker stores and evicts; the message arrives, or does not."""
        worker = self.workers.setdefault(worker_id, Worker())
        removed = (removed - stored) & worker.blocks
        before = worker.sequence
        worker.sequence += len(stored) + len(removed)
        worker.blocks = (worker.blocks | stored) - removed
        if lost:
            return
        applied = self.index.apply(worker_id, CacheEvents(
            epoch=worker.epoch, previous_sequence=before, sequence=worker.sequence,
            stored=tuple(stored), removed=tuple(removed),
        ))
        follows = worker.told is not None and worker.told_sequence == before
        assert applied is (Applied.IN_ORDER if follows else Applied.GAP)
        if follows:
            worker.told, worker.told_sequence = set(worker.blocks), worker.sequence

    @rule(worker_id=WORKERS)
    def reconnect(self, worker_id: str) -> None:
        """The reader resumes where it stands, or takes a snapshot."""
        worker = self.workers.setdefault(worker_id, Worker())
        since = self.index.resume(worker_id, worker.epoch)
        assert since == (worker.told_sequence if worker.told is not None else 0)
        if since == worker.sequence and since:
            return
        self.index.apply(worker_id, CacheEvents(
            epoch=worker.epoch, previous_sequence=0, sequence=worker.sequence, is_snapshot=True,
            stored=tuple(worker.blocks),
        ))
        worker.told, worker.told_sequence = set(worker.blocks), worker.sequence

    @rule(worker_id=WORKERS)
    def restart(self, worker_id: str) -> None:
        worker = self.workers.setdefault(worker_id, Worker())
        self.workers[worker_id] = Worker(life=worker.life + 1)
        self.index.resume(worker_id, self.workers[worker_id].epoch)

    @rule(worker_id=WORKERS)
    def leave(self, worker_id: str) -> None:
        self.index.forget(worker_id)
        if worker_id in self.workers:
            self.workers[worker_id].told = None

    def expected(self, prompt: list[bytes]) -> dict[str, int]:
        held = {}
        for worker_id, worker in self.workers.items():
            depth = 0
            while worker.told is not None and depth < len(prompt) and prompt[depth] in worker.told:
                depth += 1
            if depth:
                held[worker_id] = depth
        return held

    @invariant()
    def answers_agree(self) -> None:
        for prompt in PROMPTS:
            assert self.index.held(prompt) == self.expected(prompt)

    @invariant()
    def books_agree(self) -> None:
        told = {worker_id: worker.told or set() for worker_id, worker in self.workers.items()}
        assert self.index.num_entries == sum(len(blocks) for blocks in told.values())
        assert self.index.num_blocks == len(set().union(*told.values()))


class BoundedMachine(IndexMachine):
    """Too small for everything: it may know less than the workers hold, never more, and never outgrows its bound."""

    max_entries = 12

    @invariant()
    def answers_agree(self) -> None:
        for prompt in PROMPTS:
            expected = self.expected(prompt)
            for worker_id, depth in self.index.held(prompt).items():
                assert depth <= expected[worker_id]

    @invariant()
    def books_agree(self) -> None:
        assert self.index.num_entries <= self.max_entries
        assert self.index.num_blocks <= self.index.num_entries
        assert self.index.num_entries == sum(self.index.num_blocks_at(worker_id) for worker_id in self.workers)


MACHINES = [IndexMachine, BoundedMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_index_equals_its_model(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_the_index_equals_its_model_at_length(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(machine, settings=LONG)
