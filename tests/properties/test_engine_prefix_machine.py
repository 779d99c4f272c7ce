"""The prefix cache in any order of events, and planted bugs of it, each of which the same machine finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.chain import Chain
from pd_engine.cache.prefix import PrefixCache
from support.prefix_machine import PrefixMachine

GENERATE = (Phase.generate,)  # a bug need not be shrunk

TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


class TokensNotCompared(PrefixCache):
    """A hash stands for its tokens."""

    def _entry(self, chain: Chain, index: int) -> Any:
        return self._entries.get(chain.hashes[index])


class SaltForgotten(PrefixCache):
    def chain(self, token_ids: Sequence[int], *, num_prompt_tokens: int, salt: str = "") -> Chain:
        return super().chain(token_ids, num_prompt_tokens=num_prompt_tokens)


class MtpTakenForGranted(PrefixCache):
    """Whatever is final in the main layers counts as final in MTP's."""

    def store(self, chain: Chain, block_ids: Sequence[int], *, num_final: int, num_final_mtp: int) -> None:
        super().store(chain, block_ids, num_final=num_final, num_final_mtp=num_final)


class StoredTooEarly(PrefixCache):
    """A block is stored with its last position still to be written."""

    def store(self, chain: Chain, block_ids: Sequence[int], *, num_final: int, num_final_mtp: int) -> None:
        super().store(chain, block_ids, num_final=num_final + 1, num_final_mtp=num_final_mtp)


class EveryCopyIsKept(PrefixCache):
    def released(self, block: int) -> bool:
        return block in self._by_block


class ForgottenWhenEvicted(PrefixCache):
    def evicted(self, block: int) -> None:
        return


class FirstBlocksGoFirst(BlockPool):
    def release(self, blocks: Sequence[int], owner: str) -> None:
        super().release(list(reversed(blocks)), owner)


class PinnedBlocksAreKeptToo(BlockPool):
    """A hold of a kept block leaves it where room is taken from."""

    def hold(self, blocks: Any, owner: str) -> None:
        kept = [block for block in blocks if block in self._kept]
        super().hold(blocks, owner)
        self._kept.update(dict.fromkeys(kept))


class GenerationNotRaised(BlockPool):
    def __init__(self, num_blocks: int, on_reuse: Any = None) -> None:
        super().__init__(num_blocks)


BUGS: list[tuple[type[PrefixCache], type[BlockPool]]] = [
    (TokensNotCompared, BlockPool), (SaltForgotten, BlockPool), (MtpTakenForGranted, BlockPool),
    (StoredTooEarly, BlockPool), (EveryCopyIsKept, BlockPool), (ForgottenWhenEvicted, BlockPool),
    (PrefixCache, FirstBlocksGoFirst), (PrefixCache, PinnedBlocksAreKeptToo), (PrefixCache, GenerationNotRaised),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "pool"), BUGS, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(cache: type[PrefixCache], pool: type[BlockPool]) -> None:
    class Planted(PrefixMachine):
        pool_class = pool
        cache_class = cache

    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the bug breaks first
        run_state_machine_as_test(
            Planted, settings=settings(
                max_examples=400, stateful_step_count=30, deadline=None, derandomize=True, database=None,
                phases=GENERATE,
            ),
        )
