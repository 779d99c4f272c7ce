"""What a step computes of which prompts: promises over random queues."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_engine.chunk_plan import ChunkPlan, Remaining, plan_chunks
from pd_engine.priority import NEAR_DEADLINE_S, SECONDS_A_LEVEL, Turn, due_s

prompt_lengths = st.lists(st.integers(1, 2_000), min_size=1, max_size=12)


def queue(lengths: list[int]) -> list[Remaining]:
    return [Remaining(f"p{index}", length, priority=length % 3) for index, length in enumerate(lengths)]


@settings(deadline=None)
@given(prompt_lengths, st.integers(1, 512))
def test_a_step_uses_its_whole_budget_and_no_more(lengths: list[int], budget: int) -> None:
    plan = plan_chunks(queue(lengths), budget)
    assert sum(chunk.num_tokens for chunk in plan) == min(budget, sum(lengths))
    remaining = {prompt.name: prompt.num_tokens for prompt in queue(lengths)}
    assert all(1 <= chunk.num_tokens <= remaining[chunk.name] for chunk in plan)
    assert len({chunk.name for chunk in plan}) == len(plan)


@settings(deadline=None)
@given(prompt_lengths, st.integers(1, 512))
def test_the_first_always_moves_on_by_half_the_budget(lengths: list[int], budget: int) -> None:
    first = plan_chunks(queue(lengths), budget)[0]
    assert first.name == "p0"
    assert first.num_tokens >= min(lengths[0], -(-budget // 2))


@settings(deadline=None)
@given(prompt_lengths, st.integers(1, 256))
def test_everything_is_computed_in_the_least_number_of_steps(lengths: list[int], budget: int) -> None:
    remaining = {prompt.name: prompt.num_tokens for prompt in queue(lengths)}
    steps = 0
    while remaining:
        for chunk in plan_chunks([Remaining(name, left) for name, left in remaining.items()], budget):
            remaining[chunk.name] -= chunk.num_tokens
        remaining = {name: left for name, left in remaining.items() if left}
        steps += 1
    assert steps == -(-sum(lengths) // budget)


def test_a_short_prompt_behind_a_long_one_is_done_in_the_first_step() -> None:
    plan = plan_chunks([Remaining("long", 10_000), Remaining("other", 9_000), Remaining("short", 60)], 256)
    assert plan == [ChunkPlan("long", 128), ChunkPlan("other", 68), ChunkPlan("short", 60)]


def test_a_prompt_alone_gets_the_whole_budget() -> None:
    assert plan_chunks([Remaining("long", 10_000)], 256) == [ChunkPlan("long", 256)]
    assert plan_chunks([], 256) == []


def test_an_old_prompt_has_half_a_step_and_urgent_ones_the_rest_before_its_equals() -> None:
    queue = [Remaining("old", 10_000), Remaining("short", 50), Remaining("urgent", 100, priority=-1)]
    assert plan_chunks(queue, 256) == [ChunkPlan("old", 128), ChunkPlan("short", 28), ChunkPlan("urgent", 100)]


def test_the_less_urgent_have_what_the_first_leaves() -> None:
    urgent, usual = Remaining("urgent", 300, priority=-1), Remaining("usual", 10)
    assert plan_chunks([urgent, usual], 256) == [ChunkPlan("urgent", 256)]
    assert plan_chunks([Remaining("urgent", 44, priority=-1), usual], 256) == [
        ChunkPlan("urgent", 44), ChunkPlan("usual", 10)
    ]


@settings(deadline=None)
@given(st.integers(-1_000, 1_000), st.integers(-1_000, 1_000), st.floats(0, 1e5), st.floats(0, 1e5))
def test_who_waits_is_passed_for_a_bounded_time(ours: int, theirs: int, arrived_s: float, later_s: float) -> None:
    """By those of a more urgent level that come within `SECONDS_A_LEVEL` a level, by nobody of its own level."""
    mine = Turn(priority=ours, arrived_s=arrived_s)
    other = Turn(priority=theirs, arrived_s=arrived_s + later_s)
    if other.rank < mine.rank:
        assert theirs < ours
        assert later_s <= SECONDS_A_LEVEL * (ours - theirs)


left_s = st.one_of(st.none(), st.floats(0, 1e4))


@settings(deadline=None)
@given(left_s, left_s, st.integers(-1_000, 1_000), st.floats(0, 1e5), st.floats(0, 1e5))
def test_deadlines_order_those_of_one_level_for_a_bounded_time(
    ours: float | None, theirs: float | None, priority: int, arrived_s: float, later_s: float
) -> None:
    """Whoever has the earlier deadline goes first, of those that came together and of near ones; and who waits is not
    passed for ever, nor by a less urgent one that came with it."""
    def turn(level: int, came_s: float, left: float | None) -> Turn:
        return Turn(priority=level, arrived_s=came_s, deadline_s=None if left is None else came_s + left)

    mine, other = turn(priority, arrived_s, ours), turn(priority, arrived_s + later_s, theirs)
    if other.rank < mine.rank:
        assert theirs is not None
        assert later_s <= SECONDS_A_LEVEL
    together = turn(priority, arrived_s, theirs)
    if ours is not None and (theirs is None or theirs > 1.01 * ours + 0.01) and ours < 600:
        assert mine.rank < together.rank
    if ours is not None and theirs is not None and max(ours, theirs) <= NEAR_DEADLINE_S:
        assert (mine.deadline_s or 0) - (other.deadline_s or 0) == pytest.approx(mine.rank - other.rank, abs=1e-6)
    assert together.rank <= turn(priority + 1, arrived_s, ours).rank


def test_a_farther_deadline_counts_for_less() -> None:
    assert [round(due_s(100.0, deadline_s) - 100, 2) for deadline_s in (90.0, 104.0, 109.0, 120.0, 700.0, None)] == [
        0.0, 4.0, 9.0, 9.55, 9.98, 10.0
    ]


def test_of_one_level_who_came_first_and_of_one_time_the_lower_number() -> None:
    turns = [Turn(priority=p, arrived_s=t) for p, t in ((1, 0.0), (0, 2.0), (0, 1.0), (-1, 3.0))]
    ordered = sorted(turns, key=lambda turn: turn.rank)
    assert [(t.priority, t.arrived_s) for t in ordered] == [(-1, 3.0), (0, 1.0), (0, 2.0), (1, 0.0)]
