"""A model of the prefix cache: sequences come, compute, share and go in any order, over blocks that remember what was
written to them. The cache under test is the production class, or one with a planted bug."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.chain import Chain
from pd_engine.cache.events import CacheLog
from pd_engine.cache.prefix import PrefixCache
from pd_engine.errors import ResourceExhausted

NUM_BLOCKS = 9
BLOCK_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


def weak_hash(parent: bytes, tokens: bytes) -> bytes:
    """Of few values, so that different blocks often have the same one."""
    return bytes([(parent[0] * 3 + sum((1 + place) * value for place, value in enumerate(tokens))) % 11])


@dataclass(eq=False)
class Live:
    """A sequence that runs. `num_mtp`: leading positions with MTP slots; None: it writes none."""

    name: str
    salt: str
    token_ids: list[int]
    chain: Chain
    block_ids: list[int]
    num_computed: int
    drafts: bool
    num_mtp: int
    own_from: int = 0


@dataclass
class Written:
    """What a block's slots hold: the salt and all tokens up to its end, and whether MTP's slots are those of them."""

    salt: str = ""
    tokens: tuple[int, ...] = ()
    has_mtp: bool = False


@dataclass
class Copy:
    """A reader of the events."""

    sequence: int | None = None
    hashes: set[bytes] = field(default_factory=set)


class PrefixMachine(RuleBasedStateMachine):
    """Subclasses set the classes under test."""

    pool_class: type[BlockPool] = BlockPool
    cache_class: type[PrefixCache] = PrefixCache

    def __init__(self) -> None:
        super().__init__()
        self.written = [Written() for _ in range(NUM_BLOCKS)]
        self.generations = [0] * NUM_BLOCKS
        self.pool = self.pool_class(NUM_BLOCKS, on_reuse=self.reused)
        self.cache = self.cache_class(
            self.pool, fingerprint="f", block_size=BLOCK_SIZE, log=CacheLog(max_backlog=6), hash_block=weak_hash
        )
        self.live: dict[str, Live] = {}
        self.reader = Copy()
        self.number = 0

    def reused(self, block: int) -> None:
        assert not any(block in sequence.block_ids for sequence in self.live.values()), f"block {block} is in use"
        self.generations[block] += 1
        self.written[block] = Written()

    @rule(token_ids=TOKENS, salt=st.sampled_from("xy"), drafts=st.booleans(), bypass=st.booleans(),
          room=st.integers(1, 3))
    def begin(self, token_ids: list[int], salt: str, drafts: bool, bypass: bool, room: int) -> None:
        """The longest cached prefix is what was written for exactly these tokens and this salt."""
        self.number += 1
        name = f"sequence {self.number}"
        chain = self.cache.chain(token_ids, num_prompt_tokens=len(token_ids), salt=salt)
        cached = [] if bypass else self.cache.match(chain, with_mtp=drafts)
        for index, block in enumerate(cached):
            found, end = self.written[block], (index + 1) * BLOCK_SIZE
            assert (found.salt, found.tokens) == (salt, tuple(token_ids[:end])), (index, block, found)
            assert found.has_mtp or not drafts, f"block {block} has no MTP slots"
        count = len(token_ids) // BLOCK_SIZE + room
        free = self.pool.num_free - sum(not self.pool.is_held(block) for block in cached)
        self.pool.hold(cached, name)
        try:
            fresh = self.pool.allocate(count - len(cached), name)
        except ResourceExhausted:
            assert count - len(cached) > free
            self.pool.release(cached, name)
            return
        sequence = Live(
            name=name, salt=salt, token_ids=list(token_ids), chain=chain, block_ids=[*cached, *fresh],
            num_computed=len(cached) * BLOCK_SIZE, drafts=drafts, num_mtp=len(cached) * BLOCK_SIZE,
            own_from=len(cached),
        )
        self.live[name] = sequence
        assert self.cache.begin(chain, sequence.block_ids) == self.num_with_mtp(cached)

    def num_with_mtp(self, cached: list[int]) -> int:
        lacking = (index for index, block in enumerate(cached) if not self.written[block].has_mtp)
        return next(lacking, len(cached))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), lag=st.integers(0, 2), new=st.lists(st.integers(0, 1), max_size=3))
    def compute(self, data: st.DataObject, lag: int, new: list[int]) -> None:
        """Some of its tokens get their slots, MTP's up to `lag` positions later; then it may go on with new tokens."""
        sequence = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        most = len(sequence.token_ids)
        sequence.num_computed = data.draw(st.integers(sequence.num_computed, most))
        if sequence.drafts:
            sequence.num_mtp = max(sequence.num_mtp, sequence.num_computed - lag)
        for index in range(sequence.own_from, len(sequence.block_ids)):
            end = (index + 1) * BLOCK_SIZE
            if end <= sequence.num_computed:
                self.written[sequence.block_ids[index]] = Written(
                    salt=sequence.salt, tokens=tuple(sequence.token_ids[:end]), has_mtp=end <= sequence.num_mtp
                )
        self.cache.store(
            sequence.chain, sequence.block_ids, num_final=sequence.num_computed,
            num_final_mtp=sequence.num_mtp if sequence.drafts else 0,
        )
        room = len(sequence.block_ids) * BLOCK_SIZE - len(sequence.token_ids)
        sequence.token_ids += new[:room]
        sequence.chain.extend(new[:room])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.pool.release(sequence.block_ids, sequence.name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hand_on(self, data: st.DataObject) -> None:
        """Its blocks change their owner, as at the end of a handoff."""
        sequence = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        new = sequence.name + "'"
        self.pool.transfer(sequence.block_ids, sequence.name, new)
        del self.live[sequence.name]
        sequence.name = new
        self.live[new] = sequence

    @rule(count=st.integers(1, 3), quarantine=st.booleans())
    def others(self, count: int, quarantine: bool) -> None:
        """Somebody takes blocks for another purpose, and gives them back."""
        before = list(self.generations)
        try:
            blocks = self.pool.allocate(count, "others")
        except ResourceExhausted:
            return
        assert all(self.generations[block] == before[block] + 1 for block in blocks), "a generation was not raised"
        if quarantine:
            self.pool.quarantine(blocks, "others")
            self.pool.end_quarantine(blocks)
        else:
            self.pool.release(blocks, "others")

    @rule(forget=st.booleans())
    def read_events(self, forget: bool) -> None:
        """A reader that follows the events, with gaps, knows what is stored."""
        if forget:
            self.reader = Copy()
        changes = self.cache.log.changes_after(self.reader.sequence)
        if changes is not None:
            known = set() if changes.snapshot else self.reader.hashes
            assert not set(changes.stored) & set(changes.removed)
            self.reader = Copy(changes.sequence, (known | set(changes.stored)) - set(changes.removed))
        assert self.reader.hashes == set(self.cache.log.hashes)

    @invariant()
    def books_agree(self) -> None:
        self.cache.check_integrity()
        held = {block for sequence in self.live.values() for block in sequence.block_ids}
        assert self.pool.num_free == NUM_BLOCKS - len(held), "what nobody holds can be allocated"
        for block in self.pool.kept():
            assert block not in held, f"block {block} is held, and may be evicted"

    def teardown(self) -> None:
        for sequence in self.live.values():
            self.pool.release(sequence.block_ids, sequence.name)
        self.live.clear()
        self.cache.check_integrity()
        assert self.pool.num_free == NUM_BLOCKS
