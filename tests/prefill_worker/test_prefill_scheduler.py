"""The prefill scheduler's promises, over random queues."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_worker.scheduler import MAX_OVERTAKES, ChunkPlan, Remaining, Waiting, admit, plan_chunks, queue_wait_ms

prompt_lengths = st.lists(st.integers(1, 2_000), min_size=1, max_size=12)


def queue(lengths: list[int]) -> list[Remaining]:
    return [Remaining(f"p{index}", length) for index, length in enumerate(lengths)]


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
def test_the_oldest_always_moves_on_by_half_the_budget(lengths: list[int], budget: int) -> None:
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


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 100))
def test_admission_never_gives_more_blocks_than_there_are(sizes: list[int], free: int) -> None:
    waiting = [Waiting(f"p{index}", size) for index, size in enumerate(sizes)]
    admitted = admit(waiting, free)
    by_name = {prompt.name: prompt for prompt in waiting}
    assert sum(by_name[name].num_blocks for name in admitted) <= free
    assert admitted == [prompt.name for prompt in waiting if prompt.name in set(admitted)]
    if sizes and sizes[0] <= free:
        assert admitted[0] == "p0"


def test_a_prompt_that_does_not_fit_is_overtaken_a_bounded_number_of_times() -> None:
    overtaken = 0
    for number in range(1_000):
        admitted = admit([Waiting("big", 10, overtaken), Waiting(f"small{number}", 1)], 5)
        if not admitted:
            break
        overtaken += len(admitted)
    assert overtaken == MAX_OVERTAKES
    many = [Waiting(f"small{index}", 1) for index in range(100)]
    assert len(admit([Waiting("big", 200), *many], 100)) == MAX_OVERTAKES


def test_the_retry_hint_is_what_the_queue_takes() -> None:
    assert queue_wait_ms(5_000, 2_500.0) == 2_000
    assert queue_wait_ms(5_000, 0.0) == 1_000
    assert queue_wait_ms(0, 2_500.0) == 100
    assert queue_wait_ms(10**9, 1.0) == 60_000
