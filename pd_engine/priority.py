"""Which of two requests goes first. A lower number is earlier, as in vLLM. Pure and torch-free."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """When it is a request's turn.

    Attributes:
        arrived_s, deadline_s: on the worker's clock; no deadline: None.
    """

    priority: int = DEFAULT_PRIORITY
    arrived_s: float = 0.0
    deadline_s: float | None = None

    @property
    def rank(self) -> float:
        """The least of these goes first: of one priority who came first. Whoever waits is passed by those of the level
        above for `SECONDS_A_LEVEL` at most, of two levels above for twice as long, and so on: nobody starves."""
        return self.arrived_s + SECONDS_A_LEVEL * self.priority

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s >= self.deadline_s
