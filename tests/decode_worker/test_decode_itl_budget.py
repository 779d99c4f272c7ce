"""The inter-token budget of a decode worker that computes prompts beside its steps: a pure rule over durations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.itl_budget import MAX_SKIPPED_STEPS, MIN_CHUNK_TOKENS, ItlBudget


def play(
    budget: ItlBudget, num_steps: int, *, decode_s: Callable[[int], float], fixed_s: float, token_s: float
) -> Iterator[tuple[int, float]]:
    """(tokens of the chunk, duration of step and chunk) of each step, where chunks take `fixed_s` and `token_s` a
    token."""
    for step in range(num_steps):
        tokens = budget.chunk_tokens(decode_s(step))
        chunk_s = fixed_s + tokens * token_s if tokens else 0.0
        if tokens:
            budget.note_chunk(tokens, chunk_s)
        yield tokens, decode_s(step) + chunk_s


@settings(deadline=None, max_examples=200)
@given(
    budget_s=st.floats(0.005, 0.5), decode_share=st.floats(0.01, 0.99), fixed_share=st.floats(0.0, 1.0),
    token_s=st.floats(1e-6, 1e-2),
)
def test_every_chunk_that_is_not_a_smallest_one_fits_the_budget(
    budget_s: float, decode_share: float, fixed_share: float, token_s: float
) -> None:
    steps = play(
        ItlBudget(budget_s, 10_000), 300, decode_s=lambda step: decode_share * budget_s,
        fixed_s=fixed_share * budget_s, token_s=token_s,
    )
    for tokens, seconds in steps:
        assert tokens <= MIN_CHUNK_TOKENS or seconds <= budget_s * (1 + 1e-9)


def test_the_room_is_used() -> None:
    """A decode step of 10 ms leaves 40; a share of it is kept for the next one to be longer."""
    *_, (tokens, seconds) = play(
        ItlBudget(0.050, 10_000), 200, decode_s=lambda step: 0.010, fixed_s=0.002, token_s=0.0002
    )
    assert tokens > 100
    assert 0.035 <= seconds <= 0.050


def test_steps_that_vary_are_held_within_the_budget_too() -> None:
    steps = play(
        ItlBudget(0.050, 10_000), 500, decode_s=lambda step: 0.012 + 0.006 * (step % 5) / 4, fixed_s=0.002,
        token_s=0.0002,
    )
    assert max(seconds for _, seconds in steps) <= 0.050


def test_a_chunk_that_was_slow_makes_the_next_one_small_at_once() -> None:
    budget = ItlBudget(0.050, 10_000)
    budget.note_chunk(100, 0.010)
    before = budget.chunk_tokens(0.010)
    budget.note_chunk(100, 0.050)
    assert budget.chunk_tokens(0.010) <= before / 4
    budget.note_chunk(100, 0.010)
    assert budget.chunk_tokens(0.010) < before / 2, "and one fast one is not believed"


def test_prompts_move_on_beside_steps_that_leave_no_room() -> None:
    steps = list(play(ItlBudget(0.010, 256), 50, decode_s=lambda step: 0.030, fixed_s=0.002, token_s=0.0002))
    chunks = [tokens for tokens, _ in steps]
    assert chunks == ([0] * MAX_SKIPPED_STEPS + [MIN_CHUNK_TOKENS]) * 10


def test_where_nothing_decodes_nobody_waits() -> None:
    budget = ItlBudget(0.001, 256)
    assert [budget.chunk_tokens(None) for _ in range(3)] == [256] * 3
    budget.note_chunk(16, 1.0)
    assert budget.chunk_tokens(None) == 256
