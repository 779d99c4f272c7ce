"""The block pool against a model of it: any operations, in any order."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_engine.cache.blocks import BlockPool
from pd_engine.errors import ResourceExhausted

NUM_BLOCKS = 7
OWNERS = st.sampled_from(["a", "b", "c"])


class Pool(RuleBasedStateMachine):
    """`holds` counts holds by (block, owner), as the documentation says they change."""

    def __init__(self) -> None:
        super().__init__()
        self.reused: Counter[int] = Counter()
        self.pool = BlockPool(NUM_BLOCKS, on_reuse=lambda block: self.reused.update([block]))
        self.holds: Counter[tuple[int, str]] = Counter()
        self.quarantined: set[int] = set()
        self.allocated: Counter[int] = Counter()

    def held(self) -> set[int]:
        return {block for block, _ in self.holds}

    @rule(count=st.integers(0, NUM_BLOCKS + 1), owner=OWNERS)
    def allocate(self, count: int, owner: str) -> None:
        free = NUM_BLOCKS - len(self.held()) - len(self.quarantined)
        try:
            blocks = self.pool.allocate(count, owner)
        except ResourceExhausted:
            assert count > free
            return
        assert len(blocks) == len(set(blocks)) == count <= free
        assert not set(blocks) & (self.held() | self.quarantined)
        self.holds.update((block, owner) for block in blocks)
        self.allocated.update(blocks)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), owner=OWNERS)
    def hold(self, data: st.DataObject, owner: str) -> None:
        blocks = data.draw(st.sets(st.sampled_from(sorted(self.held()))))
        self.pool.hold(blocks, owner)
        self.holds.update((block, owner) for block in blocks)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block, owner = data.draw(st.sampled_from(sorted(self.holds)))
        self.pool.release([block], owner)
        self.drop(block, owner)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), new=OWNERS)
    def transfer(self, data: st.DataObject, new: str) -> None:
        block, owner = data.draw(st.sampled_from(sorted(self.holds)))
        self.pool.transfer([block], owner, new)
        self.drop(block, owner)
        self.holds[block, new] += 1

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        block, owner = data.draw(st.sampled_from(sorted(self.holds)))
        if len(self.pool.owners(block)) > 1:
            return
        self.pool.quarantine([block], owner)
        self.drop(block, owner)
        self.quarantined.add(block)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.pool.end_quarantine([block])
        self.quarantined.remove(block)

    def drop(self, block: int, owner: str) -> None:
        self.holds[block, owner] -= 1
        self.holds += Counter()  # drops zeros

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_quarantined == len(self.quarantined)
        assert self.pool.num_free == NUM_BLOCKS - len(self.held()) - len(self.quarantined)
        for block in range(NUM_BLOCKS):
            want = [owner for (held, owner), count in self.holds.items() if held == block for _ in range(count)]
            assert sorted(self.pool.owners(block)) == sorted(want)
        assert self.reused == self.allocated


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
