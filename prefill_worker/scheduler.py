"""Which prompts get blocks. Pure: a snapshot in, a decision out. `pd_engine.chunk_plan` says what a step computes."""

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


def admit(waiting: Sequence[Waiting], num_free_blocks: int) -> list[str]:
    """Names of prompts to give blocks to now, in the order of `waiting`, which is that of `Turn.rank`.

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


def queue_wait_ms(num_tokens_ahead: int, tokens_per_s: float) -> int:
    """How long until a worker has computed what is queued, as a retry hint; a second while no rate is known."""
    return min(60_000, max(100, round(1000 * num_tokens_ahead / tokens_per_s))) if tokens_per_s > 0 else 1_000
