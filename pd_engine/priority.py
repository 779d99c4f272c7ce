"""Which of two requests goes first. A lower number is earlier, as in vLLM. Pure and torch-free."""

from __future__ import annotations

from pd_engine.errors import InvalidArgument, shown

DEFAULT_PRIORITY = 0
MAX_PRIORITY = 1_000
SECONDS_A_LEVEL = 10.0  # of waiting, that count as much as one level


def check_priority(priority: int) -> int:
    """Raises:
    InvalidArgument: it is outside its range.
    """
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidArgument(
            f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], lower is earlier, got {shown(priority)}"
        )
    return priority


def rank(priority: int, arrived_s: float) -> float:
    """The least of these goes first: of one priority who came first. Whoever waits is passed by those of a level above
    for `SECONDS_A_LEVEL` at most, of two levels for twice as long, and so on: nobody starves."""
    return arrived_s + SECONDS_A_LEVEL * priority
