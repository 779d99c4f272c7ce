"""The prefix cache and its events by example; the machine in tests/properties tries every order."""

from __future__ import annotations

import pytest

from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.chain import Chain
from pd_engine.cache.events import CacheChanges, CacheLog
from pd_engine.cache.prefix import PrefixCache
from pd_engine.hashing import block_hashes
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import Sequence
from pd_engine.service.cache_events import event_batches
from pd_engine.steps.state import take_cached

IDS = [11, 12, 13, 14, 15, 16, 17]


def new_cache(num_blocks: int = 8, *, prompts_only: bool = False) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, fingerprint="f", block_size=2, prompts_only=prompts_only)


def chain_of(cache: PrefixCache, token_ids: list[int], num_prompt_tokens: int | None = None, salt: str = "") -> Chain:
    return cache.chain(token_ids, num_prompt_tokens=num_prompt_tokens or len(token_ids), salt=salt)


def compute(
    pool: BlockPool, cache: PrefixCache, owner: str, token_ids: list[int], *, num_mtp: int | None = None
) -> list[int]:
    """All tokens of a new sequence, none of them taken from the cache."""
    chain, blocks = chain_of(cache, token_ids), pool.allocate(-(-len(token_ids) // 2), owner)
    cache.begin(chain, blocks)
    cache.store(
        chain, blocks, num_final=len(token_ids), num_final_mtp=len(token_ids) if num_mtp is None else num_mtp
    )
    cache.check_integrity()
    return blocks


def test_what_is_held_or_kept_is_found_up_to_the_first_difference() -> None:
    pool, cache = new_cache()
    blocks = compute(pool, cache, "a", IDS)
    assert cache.match(chain_of(cache, IDS), with_mtp=True) == blocks[:3]
    pool.release(blocks, "a")
    assert (pool.num_free, pool.num_kept) == (8, 3)
    assert cache.match(chain_of(cache, [*IDS[:4], 9, 9]), with_mtp=True) == blocks[:2]
    assert cache.match(chain_of(cache, IDS[:3]), with_mtp=True) == blocks[:1]
    assert cache.match(chain_of(cache, IDS[1:]), with_mtp=True) == []
    assert cache.match(chain_of(cache, IDS, salt="another"), with_mtp=True) == []


def test_room_is_made_of_free_blocks_then_of_the_deepest_of_what_was_used_longest_ago() -> None:
    pool, cache = new_cache(6)
    old, new = compute(pool, cache, "a", [1, 1, 1, 1]), compute(pool, cache, "b", [2, 2, 2, 2])
    pool.release(old, "a")
    pool.release(new, "b")
    pool.hold(cache.match(chain_of(cache, [1, 1]), with_mtp=True), "c")
    pool.release(old[:1], "c")
    taken = pool.allocate(5, "d")
    assert not set(taken[:2]) & {*old, *new}
    assert taken[2:] == [old[1], new[1], new[0]]
    assert cache.match(chain_of(cache, [1, 1, 1, 1]), with_mtp=True) == old[:1]
    cache.check_integrity()


def test_pinned_blocks_stay() -> None:
    pool, cache = new_cache(4)
    blocks = compute(pool, cache, "a", [1, 1, 1, 1])
    pool.hold(blocks[:1], "pin")
    pool.release(blocks, "a")
    assert pool.num_free == 3
    assert blocks[0] not in pool.allocate(3, "b")


def test_two_copies_are_kept_only_while_both_are_held() -> None:
    pool, cache = new_cache()
    first, second = compute(pool, cache, "a", IDS[:4]), compute(pool, cache, "b", IDS[:4])
    pool.release(first, "a")
    assert (pool.num_kept, pool.num_free) == (0, 6)
    pool.release(second, "b")
    assert list(pool.kept()) == [second[1], second[0]]
    third = compute(pool, cache, "c", IDS[:4])
    assert pool.num_kept == 0
    assert cache.match(chain_of(cache, IDS), with_mtp=True) == third
    cache.check_integrity()


def test_the_copy_with_mtp_slots_is_the_one_that_stays() -> None:
    pool, cache = new_cache()
    whole = compute(pool, cache, "a", IDS[:4])
    lacking = compute(pool, cache, "b", IDS[:4], num_mtp=0)
    pool.release(whole, "a")
    pool.release(lacking, "b")
    assert set(pool.kept()) == set(whole)
    assert cache.match(chain_of(cache, IDS), with_mtp=True) == whole


def test_a_copy_counts_as_used_when_its_like_was() -> None:
    """Otherwise a block would go before the one that follows it."""
    pool, cache = new_cache()
    whole = compute(pool, cache, "a", IDS[:2])
    longer = compute(pool, cache, "b", IDS[:4], num_mtp=0)
    pool.release(whole, "a")
    pool.release(longer, "b")
    assert list(pool.kept()) == [longer[1], whole[0]]
    cache.check_integrity()


def test_mtp_slots_may_follow_later() -> None:
    pool, cache = new_cache()
    chain, blocks = chain_of(cache, IDS), pool.allocate(4, "a")
    assert cache.begin(chain, blocks) == 0
    cache.store(chain, blocks, num_final=5, num_final_mtp=3)
    assert len(cache.match(chain, with_mtp=False)) == 2
    assert len(cache.match(chain, with_mtp=True)) == 1
    cache.store(chain, blocks, num_final=6, num_final_mtp=6)
    assert cache.match(chain, with_mtp=True) == blocks[:3]
    assert cache.begin(chain_of(cache, IDS), blocks) == 3


def test_where_generated_positions_differ_only_prompts_are_shared() -> None:
    _, cache = new_cache(prompts_only=True)
    assert chain_of(cache, IDS, num_prompt_tokens=5).num_blocks == 2
    assert chain_of(cache, IDS).hashes == block_hashes(IDS, fingerprint="f", block_size=2)


def sequence(num_tokens: int) -> Sequence:
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=4)
    return Sequence(
        name="s", token_ids=[1] * num_tokens, num_prompt_tokens=num_tokens, params=params, ending_ids=frozenset()
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "num_cached_mtp", "num_computed"),
    [(7, 0, 0, 0), (7, 6, 6, 5), (6, 6, 6, 5), (7, 6, 0, 6), (6, 6, 0, 5), (7, 6, 4, 6), (6, 6, 4, 5)],
)
def test_the_last_cached_token_is_computed_again_where_its_state_is_needed(
    num_tokens: int, num_cached: int, num_cached_mtp: int, num_computed: int
) -> None:
    new = sequence(num_tokens)
    take_cached(new, num_cached=num_cached, num_cached_mtp=num_cached_mtp)
    assert (new.num_computed, new.num_computed_mtp) == (num_computed, num_cached_mtp)


def names(*numbers: int) -> tuple[bytes, ...]:
    return tuple(bytes([number]) * 16 for number in numbers)


def log_of(stored: int, *, max_backlog: int = 4) -> CacheLog:
    log = CacheLog(max_backlog)
    for name in names(*range(stored)):
        log.stored(name)
    return log


@pytest.mark.parametrize("sequence", [None, 1, 5, 7, -1, 2**64])
def test_who_is_too_far_behind_or_names_what_never_was_gets_a_snapshot(sequence: int | None) -> None:
    log = log_of(6)
    assert log.changes_after(sequence) == (
        CacheChanges(sequence=6, snapshot=True, stored=names(*range(6)), removed=()) if sequence != 5
        else CacheChanges(sequence=6, snapshot=False, stored=names(5), removed=())
    )


def test_of_several_changes_of_one_hash_the_last_one_counts() -> None:
    log = log_of(2, max_backlog=10)
    assert log.changes_after(2) is None
    log.removed(names(0)[0])
    log.stored(names(3)[0])
    log.removed(names(3)[0])
    log.stored(names(0)[0])
    log.removed(names(1)[0])
    assert log.changes_after(2) == CacheChanges(sequence=7, snapshot=False, stored=names(0), removed=names(3, 1))
    assert set(log.hashes) == set(names(0))
    heard: list[int] = []
    log.listen(lambda: heard.append(log.sequence))
    log.stored(names(9)[0])
    assert heard == [8]


def test_a_log_of_nothing_is_told_once() -> None:
    log = CacheLog()
    assert log.changes_after(None) == CacheChanges(sequence=0, snapshot=True, stored=(), removed=())
    assert log.changes_after(0) is None
    log.stored(names(1)[0])
    assert log.changes_after(0) == CacheChanges(sequence=1, snapshot=False, stored=names(1), removed=())


@pytest.mark.parametrize("snapshot", [True, False])
def test_large_changes_come_in_several_messages_of_which_only_the_last_counts_as_read(snapshot: bool) -> None:
    changes = CacheChanges(
        sequence=20, snapshot=snapshot, stored=names(1, 2, 3), removed=() if snapshot else names(4, 5)
    )
    batches = list(event_batches(changes, "e", 0 if snapshot else 10, max_hashes=2))
    assert [batch.snapshot for batch in batches] == [snapshot, *[False] * (len(batches) - 1)]
    before = 0 if snapshot else 10
    assert [batch.sequence for batch in batches] == [before] * (len(batches) - 1) + [20]
    assert {batch.previous_sequence for batch in batches} == {before}
    assert tuple(name for batch in batches for name in batch.stored) == changes.stored
    assert tuple(name for batch in batches for name in batch.removed) == changes.removed
    assert max(len(batch.stored) + len(batch.removed) for batch in batches) == 2
