"""Which of two requests goes first. A lower number is earlier, as in vLLM. Pure and torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pd_engine.errors import InvalidArgument, shown

DEFAULT_PRIORITY = 0
MAX_PRIORITY = 1_000
SECONDS_A_LEVEL = 10.0  # of waiting, that count as much as one level
NEAR_DEADLINE_S = 9.0   # deadlines as near as this order requests by themselves


def check_priority(priority: int) -> int:
    """Raises:
    InvalidArgument: it is outside its range.
    """
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidArgument(
            f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], lower is earlier, got {shown(priority)}"
        )
    return priority


def due_s(arrived_s: float, deadline_s: float | None) -> float:
    """When a request counts as due: at its deadline, if that is near when it comes; `SECONDS_A_LEVEL` after it came, if
    it has none; and between the two if its deadline is farther away, the sooner the nearer it is.

    So of requests that came together the one with the earlier deadline is due first, and one that waits is passed for
    the sake of deadlines only by those that come within `SECONDS_A_LEVEL` of it.
    """
    if deadline_s is None:
        return arrived_s + SECONDS_A_LEVEL
    left_s = max(0.0, deadline_s - arrived_s)
    if left_s <= NEAR_DEADLINE_S:
        return arrived_s + left_s
    return arrived_s + SECONDS_A_LEVEL - (SECONDS_A_LEVEL - NEAR_DEADLINE_S) * NEAR_DEADLINE_S / left_s


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
        """The least of these goes first: of one priority who is due first (`due_s`), so without deadlines who came
        first. Whoever waits is passed by those of the level above for `SECONDS_A_LEVEL` at most, of two levels above
        for twice as long, and so on, and by those with deadlines for one `SECONDS_A_LEVEL` more: nobody starves."""
        return due_s(self.arrived_s, self.deadline_s) + SECONDS_A_LEVEL * self.priority

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s >= self.deadline_s
