"""What a step computes of which prompts: promises over random queues."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pd_engine.chunk_plan import ChunkPlan, Remaining, plan_chunks
from pd_engine.priority import SECONDS_A_LEVEL, Turn

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


def test_of_one_level_who_came_first_and_of_one_time_the_lower_number() -> None:
    turns = [Turn(priority=p, arrived_s=t) for p, t in ((1, 0.0), (0, 2.0), (0, 1.0), (-1, 3.0))]
    ordered = sorted(turns, key=lambda turn: turn.rank)
    assert [(t.priority, t.arrived_s) for t in ordered] == [(-1, 3.0), (0, 1.0), (0, 2.0), (1, 0.0)]
