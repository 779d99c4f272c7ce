"""Which tokens of which prompts a step computes, wherever prompts are computed. Pure: a snapshot in, a decision out.

A step has a token budget. Half of it belongs to the first prompt in the order of `Turn.rank`, so that it always moves
on; the other half goes to those that are as urgent or more, the most urgent first and then shortest remainder first, so
that a short prompt behind a long one does not wait for it. What they do not take falls to the first, and what that
leaves to the less urgent. Every prompt becomes the first one day, so none starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_engine.priority import DEFAULT_PRIORITY


@dataclass(frozen=True, slots=True)
class Remaining:
    """A prompt that has its blocks and still so many tokens to compute (>= 1)."""

    name: str
    num_tokens: int
    priority: int = DEFAULT_PRIORITY


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    name: str
    num_tokens: int


def plan_chunks(prompts: Sequence[Remaining], budget: int) -> list[ChunkPlan]:
    """Tokens of each prompt that the next step computes: `budget` in all, or everything if less.

    Args:
        prompts: by rank.
    """
    assert budget >= 1, budget
    assert all(prompt.num_tokens >= 1 for prompt in prompts), prompts
    if not prompts:
        return []
    first = prompts[0]
    rest = sorted(prompts[1:], key=lambda prompt: (prompt.priority, prompt.num_tokens))  # stable: ties by rank
    reserve = min(first.num_tokens, -(-budget // 2))
    share: dict[str, int] = {}
    left = budget - reserve
    for prompt in [prompt for prompt in rest if prompt.priority <= first.priority]:
        share[prompt.name] = min(prompt.num_tokens, left)
        left -= share[prompt.name]
    share[first.name] = min(first.num_tokens, reserve + left)
    left += reserve - share[first.name]
    for prompt in [prompt for prompt in rest if prompt.priority > first.priority]:
        share[prompt.name] = min(prompt.num_tokens, left)
        left -= share[prompt.name]
    return [ChunkPlan(prompt.name, share[prompt.name]) for prompt in prompts if share[prompt.name]]
