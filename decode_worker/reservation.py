"""Whether a choice gets its blocks, decided before any prefill starts. Pure.

Blocks are granted for the whole of what the choice may become (prompt, max_tokens, drafts among them), so that a
sequence that has started never waits for room. Nothing is promised twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_engine.errors import InvalidArgument, ResourceExhausted
from pd_engine.service.requests import Choice

MIN_RETRY_MS = 50
MAX_RETRY_MS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The pool as a reservation sees it.

    Attributes:
        num_free_blocks: free now, those of the journey's own earlier lease and cached ones that others hold included.
        num_blocks: all.
        min_remaining_tokens: the least that a running sequence may still generate; None if none runs.
        itl_ms: between two tokens of a sequence; 0: not yet measured.
    """

    block_size: int
    num_free_blocks: int
    num_blocks: int
    min_remaining_tokens: int | None
    itl_ms: float


def num_slots(choice: Choice) -> int:
    """Slots of the cache at the choice's greatest length. Every token but the last one has a slot; drafts never go
    beyond it, as no more are made than could still be emitted (`pd_engine.steps.decode`)."""
    return choice.num_prompt_tokens + choice.params.max_tokens - 1


def num_blocks_granted(choice: Choice, room: Room) -> int:
    """Blocks for the whole choice.

    Raises:
        InvalidArgument: more than the worker has at all.
        ResourceExhausted: more than are free; with a hint when to try again.
    """
    needed = -(-num_slots(choice) // room.block_size)
    if needed > room.num_blocks:
        raise InvalidArgument(
            f"prompt ({choice.num_prompt_tokens} tokens) and max_tokens ({choice.params.max_tokens}) need "
            f"{needed} blocks; a decode worker has {room.num_blocks}: shorten the prompt or lower max_tokens"
        )
    if needed > room.num_free_blocks:
        raise ResourceExhausted(
            f"{needed} blocks are needed, {room.num_free_blocks} of {room.num_blocks} are free",
            retry_after_ms=retry_after_ms(room),
        )
    return needed


def retry_after_ms(room: Room) -> int:
    """When the first running sequence may have ended."""
    if room.min_remaining_tokens is None:
        return MIN_RETRY_MS
    return min(MAX_RETRY_MS, max(MIN_RETRY_MS, round(room.min_remaining_tokens * room.itl_ms)))
