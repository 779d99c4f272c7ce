"""Admission by projected blocks, and the batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.reservation import (
    MAX_RETRY_MS,
    MIN_RETRY_MS,
    Room,
    num_blocks_granted,
    num_projected_slots,
    num_slots,
    retry_after_ms,
)
from decode_worker.scheduler import Batch, Place
from pd_engine.errors import InvalidArgument, ResourceExhausted
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.requests import Choice


def choice(prompt: int, max_tokens: int, speculate: int = 1, emitted: int = 0) -> Choice:
    return Choice(
        token_ids=(7,) * (prompt + emitted),
        num_prompt_tokens=prompt,
        params=SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=max_tokens),
        ending_ids=frozenset(),
        speculate=speculate,
    )


def room(
    free: int, total: int, *, remaining: int | None = None, itl_ms: float = 0.0, projected_tokens: int = 0,
    spoken_for: int = 0, preempted: int = 0,
) -> Room:
    return Room(
        block_size=16, num_free_blocks=free, num_blocks=total, num_spoken_for_blocks=spoken_for,
        num_preempted=preempted, projected_tokens=projected_tokens, min_remaining_tokens=remaining, itl_ms=itl_ms,
    )


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 8), st.integers(1, 80), st.integers(0, 80))
def test_a_grant_covers_the_whole_choice_and_exists(
    prompt: int, max_tokens: int, speculate: int, total: int, free: int
) -> None:
    asked, place = choice(prompt, max_tokens, speculate), room(min(free, total), total)
    if num_slots(asked) > total * 16:
        with pytest.raises(InvalidArgument):
            num_blocks_granted(asked, place)
    elif num_slots(asked) > place.num_free_blocks * 16:
        with pytest.raises(ResourceExhausted) as caught:
            num_blocks_granted(asked, place)
        assert caught.value.retry_after_ms is not None
    else:
        granted = num_blocks_granted(asked, place)
        assert granted <= place.num_free_blocks
        assert granted * 16 >= num_slots(asked) > (granted - 1) * 16


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(2, 500), st.integers(0, 8), st.integers(1, 600), st.data())
def test_a_grant_covers_the_projection_and_never_more_than_the_whole(
    prompt: int, max_tokens: int, speculate: int, projected_tokens: int, data: st.DataObject
) -> None:
    emitted = data.draw(st.integers(0, max_tokens - 1))
    asked = choice(prompt, max_tokens, speculate, emitted)
    granted = num_blocks_granted(asked, room(200, 200, projected_tokens=projected_tokens))
    assert granted * 16 >= min(num_slots(asked), prompt + emitted + projected_tokens + speculate) > (granted - 1) * 16
    assert granted <= num_blocks_granted(asked, room(200, 200))
    assert num_projected_slots(asked, projected_tokens) >= prompt + emitted, "a handoff has room for every token"


def test_what_running_sequences_will_want_is_not_promised() -> None:
    asked = choice(100, 1_000)
    assert num_blocks_granted(asked, room(9, 100, projected_tokens=28)) == 9
    with pytest.raises(ResourceExhausted, match="will want 1 of these"):
        num_blocks_granted(asked, room(9, 100, projected_tokens=28, spoken_for=1))


def test_no_lease_while_a_sequence_waits_to_come_back() -> None:
    with pytest.raises(ResourceExhausted, match="2 running sequences wait") as caught:
        num_blocks_granted(choice(10, 10), room(100, 100, preempted=2, remaining=10, itl_ms=20.0))
    assert caught.value.retry_after_ms == 200


def test_a_projection_does_not_admit_what_could_never_end() -> None:
    with pytest.raises(InvalidArgument, match="a decode worker has 100"):
        num_blocks_granted(choice(100, 2_000), room(100, 100, projected_tokens=16))


def test_a_resume_needs_no_more_than_the_original() -> None:
    assert num_slots(choice(100, 50, emitted=20)) == num_slots(choice(100, 50))


def test_what_never_fits_is_told_apart_from_what_must_wait() -> None:
    with pytest.raises(InvalidArgument, match="shorten the prompt"):
        num_blocks_granted(choice(1_000, 1_000), room(100, 100))
    with pytest.raises(ResourceExhausted) as caught:
        num_blocks_granted(choice(100, 100), room(3, 100, remaining=10, itl_ms=20.0))
    assert caught.value.retry_after_ms == 200


def test_the_retry_hint_is_bounded() -> None:
    assert retry_after_ms(room(0, 1)) == MIN_RETRY_MS
    assert retry_after_ms(room(0, 1, remaining=1, itl_ms=0.1)) == MIN_RETRY_MS
    assert retry_after_ms(room(0, 1, remaining=10**6, itl_ms=50.0)) == MAX_RETRY_MS


@settings(deadline=None)
@given(st.lists(st.integers(0, 30)), st.integers(1, 4))
def test_sequences_join_in_order_and_keep_their_place(events: list[int], max_batch: int) -> None:
    batch, alive, arrived = Batch(max_batch), [], 0
    running: list[str] = []
    for event in events:
        if event % 3 and alive:
            gone = alive.pop(event % len(alive))
            batch.leave([gone, "unknown"])
            running = [name for name in running if name != gone]
        else:
            alive.append(f"s{arrived}")
            batch.join(f"s{arrived}", Place(arrival=arrived))
            arrived += 1
        step = batch.next_step()
        assert step == alive[: len(step)]
        assert len(step) == min(len(alive), max_batch) == batch.num_running
        assert batch.num_waiting == len(alive) - len(step)
        assert set(running) <= set(step)
        running = step


def test_one_that_comes_back_has_its_old_place() -> None:
    batch = Batch(2)
    for arrival, name in enumerate("abc"):
        batch.join(name, Place(arrival=arrival))
    batch.leave(["a"])
    assert batch.next_step() == ["b", "c"]
    batch.join("a", Place(arrival=0))
    assert batch.next_step() == ["a", "b"]


def test_one_that_waits_for_blocks_leaves_its_place_to_another() -> None:
    batch = Batch(2)
    for arrival, name in enumerate("abc"):
        batch.join(name, Place(arrival=arrival))
    assert batch.next_step(lambda name: name != "a") == ["b", "c"]
    assert batch.next_step() == ["a", "b"]
    assert (batch.num_running, batch.num_waiting) == (2, 1)


def test_the_most_urgent_have_the_places_and_of_one_priority_the_oldest() -> None:
    batch = Batch(2)
    for arrival, (name, priority) in enumerate((("a", 0), ("b", 1), ("c", 0), ("d", -1))):
        batch.join(name, Place(priority=priority, arrival=arrival))
    assert batch.next_step() == ["d", "a"]
    batch.leave(["d"])
    assert batch.next_step() == ["a", "c"]
    batch.leave(["a"])
    assert batch.next_step() == ["c", "b"]
