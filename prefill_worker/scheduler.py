"""Which prompts get blocks, and which tokens of them the next step computes. Pure: a snapshot in, a decision out.

A step has a token budget. Half of it belongs to the oldest prompt, so that it always moves on; the other half goes
to the rest, shortest remainder first, so that a short prompt behind a long one does not wait for it. What nobody
takes falls to the oldest. Every prompt becomes the oldest one day, so none starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_OVERTAKES = 32  # of one prompt that waits for blocks, by later prompts that fit


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt without blocks. `num_overtaken`: how many later ones have been admitted before it."""

    name: str
    num_blocks: int
    num_overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Remaining:
    """A prompt that has its blocks and still so many tokens to compute (>= 1)."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    name: str
    num_tokens: int


def admit(waiting: Sequence[Waiting], num_free_blocks: int) -> list[str]:
    """Names of prompts to give blocks to now, in order of arrival.

    One that does not fit may be overtaken by later ones that do, `MAX_OVERTAKES` times; after that everybody
    behind it waits until it fits.
    """
    admitted: list[str] = []
    any_passed_over = False
    most_overtaken = 0  # of those passed over, as it stands now
    for prompt in waiting:
        if most_overtaken >= MAX_OVERTAKES:
            break
        if prompt.num_blocks <= num_free_blocks:
            num_free_blocks -= prompt.num_blocks
            admitted.append(prompt.name)
            most_overtaken += any_passed_over
        else:
            any_passed_over = True
            most_overtaken = max(most_overtaken, prompt.num_overtaken)
    return admitted


def plan_chunks(prompts: Sequence[Remaining], budget: int) -> list[ChunkPlan]:
    """Tokens of each prompt, oldest first, that the next step computes: `budget` in all, or everything if less."""
    assert budget >= 1, budget
    assert all(prompt.num_tokens >= 1 for prompt in prompts), prompts
    if not prompts:
        return []
    oldest = prompts[0]
    share = {oldest.name: min(oldest.num_tokens, -(-budget // 2))}
    left = budget - share[oldest.name]
    for prompt in sorted(prompts[1:], key=lambda prompt: prompt.num_tokens):  # stable: ties by arrival
        share[prompt.name] = min(prompt.num_tokens, left)
        left -= share[prompt.name]
    share[oldest.name] += min(oldest.num_tokens - share[oldest.name], left)
    return [ChunkPlan(prompt.name, share[prompt.name]) for prompt in prompts if share[prompt.name]]


def queue_wait_ms(num_tokens_ahead: int, tokens_per_s: float) -> int:
    """How long until a worker has computed what is queued, as a retry hint; a second while no rate is known."""
    return min(60_000, max(100, round(1000 * num_tokens_ahead / tokens_per_s))) if tokens_per_s > 0 else 1_000
