"""Any demand on any pool: the production core with its pool, prefix cache and room keeper, moves and steps in any
order. And planted bugs, each of which the same worlds find."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.choice_state import ChoiceRecord
from decode_worker.host_tier import Stored
from decode_worker.preemption import Resident
from decode_worker.room import RoomKeeper
from support.room_runner import BLOCK_SIZE
from support.room_world import Request, World, answer

MAX_STANDSTILL = 8  # rounds: a move, its report, and the grant that follows


def requests(seed: int, count: int, num_blocks: int, *, with_cancels: bool) -> list[Request]:
    """Each fits the pool alone; many begin alike."""
    rng, most = random.Random(seed), num_blocks * BLOCK_SIZE
    made = []
    for number in range(count):
        prompt = rng.randint(1, most // 2)
        made.append(Request(
            journey_id=f"{number:032x}", prompt=[1 + position % 7 for position in range(prompt)] + [rng.randint(1, 3)],
            max_tokens=rng.randint(2, most - prompt), speculate=rng.randint(0, 3),
            cancel_round=rng.randint(1, 200) if with_cancels and rng.random() < 0.3 else None,
            priority=rng.choice([0, 0, -1, 2]), is_local=rng.random() < 0.4,
        ))
    return made


def check(world: World, asked: list[Request]) -> None:
    world.play(asked)
    world.assert_nothing_is_left()
    assert world.longest_standstill <= MAX_STANDSTILL, "nobody ran, although somebody could have"
    for request in asked:
        if request.cancel_round is None:
            assert request.token_ids == answer(request)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32), num_blocks=st.integers(8, 40), count=st.integers(1, 14),
    max_batch=st.sampled_from([1, 3, 16]), projected_tokens=st.sampled_from([1, 8, 40]),
    host_share=st.sampled_from([0.0, 0.5, 10.0]), with_cache=st.booleans(), with_cancels=st.booleans(),
)
def test_every_request_ends_with_its_own_tokens_whatever_the_room(
    seed: int, num_blocks: int, count: int, max_batch: int, projected_tokens: int, host_share: float,
    with_cache: bool, with_cancels: bool,
) -> None:
    world = World(
        seed, num_blocks=num_blocks, max_host_blocks=int(host_share * num_blocks), max_batch=max_batch,
        projected_tokens=projected_tokens, with_cache=with_cache,
    )
    check(world, requests(seed, count, num_blocks, with_cancels=with_cancels))


def test_prompts_whose_beginnings_are_fetched_or_not_after_all() -> None:
    """Of worlds with little room: some fetches fill their prompts, some break and leave blocks in quarantine."""
    num_fetched = num_broken = 0
    for seed in range(6):
        world = World(
            seed, num_blocks=16, max_host_blocks=40, max_batch=16, projected_tokens=8, with_cache=True
        )
        asked = requests(seed, 8, 16, with_cancels=seed % 2 == 1)
        for request in asked:
            request.is_local = True
        check(world, asked)
        num_fetched += world.fetcher.num_fetched
        num_broken += world.fetcher.num_broken
    assert num_fetched and num_broken


def test_a_projection_serves_the_same_requests_in_fewer_rounds() -> None:
    """Where every token is granted at first nobody ever leaves, and fewer run at once."""
    rounds = {0: 0, 4: 0}
    for seed in range(3):
        for projected_tokens in rounds:
            world = World(
                seed, num_blocks=30, max_host_blocks=300, max_batch=16, projected_tokens=projected_tokens,
                with_cache=False,
            )
            asked = requests(seed, 10, 30, with_cancels=False)
            for request in asked:
                request.prompt = request.prompt[:8]
            check(world, asked)
            rounds[projected_tokens] += world.round
            assert projected_tokens or world.room.num_moves == world.room.num_recomputed == 0
    assert rounds[4] < 0.9 * rounds[0], rounds


class FreedTooEarly(RoomKeeper):
    """Blocks are given back before they were copied."""

    def _move_out(self, record: ChoiceRecord) -> None:
        super()._move_out(record)
        self._blocks.release(record)


class CopiesAreKept(RoomKeeper):
    """One that is cancelled while it is away keeps its host memory."""

    def on_ended(self, record: ChoiceRecord) -> None:
        record.stored = None
        super().on_ended(record)


class NothingIsCopied(RoomKeeper):
    """It comes back to blocks that are said to hold its latents."""

    def on_moved_out(self, record: ChoiceRecord | None, stored: Stored) -> None:
        super().on_moved_out(record, stored)
        if record is not None and record.stored is not None:
            stored.copy.num_blocks = 0


class NobodyHasToLeave(RoomKeeper):
    """Who is short waits, whoever else runs."""

    def _resident(self, record: ChoiceRecord) -> Resident:
        resident = super()._resident(record)
        return Resident(**{name: getattr(resident, name) for name in Resident.__slots__} | {"may_leave": False})


class HostTierWithoutEnd(RoomKeeper):
    @property
    def _num_host_blocks_taken(self) -> int:
        return 0


class NobodyComesBack(RoomKeeper):

    def supply(self, sequences: Sequence[ChoiceRecord], others: Sequence[ChoiceRecord]) -> list[ChoiceRecord]:
        return super().supply([each for each in sequences if each.stored is None], others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "room_class",
    [FreedTooEarly, CopiesAreKept, NothingIsCopied, NobodyHasToLeave, HostTierWithoutEnd, NobodyComesBack],
)
def test_planted_bugs_are_found(room_class: type[RoomKeeper]) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011, PT012 - whatever the bug breaks first
        for seed in range(60):
            world = World(
                seed, num_blocks=24, max_host_blocks=20 + 40 * (seed % 2), max_batch=16, projected_tokens=4,
                with_cache=bool(seed % 3), room_class=room_class,
            )
            check(world, requests(seed, 8, 24, with_cancels=seed % 4 > 1))
