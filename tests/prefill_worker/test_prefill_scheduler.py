"""The prefill scheduler's promises, over random queues."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_worker.scheduler import MAX_OVERTAKES, Waiting, admit, queue_wait_ms


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
