"""Which sequences the next step decodes. Pure: continuous batching, members change at every step."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pd_engine.priority import DEFAULT_PRIORITY


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """Of a sequence among all of its worker: the most urgent first, and of one priority the one that is due first
    (`priority.due_s`), so without deadlines the oldest. It never changes: there is always one that nobody comes before,
    and who is due later than all others cannot stay behind newcomers for ever.

    Attributes:
        due_s, deadline_s: on the worker's clock; no deadline: None.
        arrival: a number that only ever grows.
    """

    priority: int = DEFAULT_PRIORITY
    due_s: float = 0.0
    arrival: int = 0
    deadline_s: float | None = field(default=None, compare=False)

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s >= self.deadline_s


class Batch:
    """Names of sequences in order of their places: each step takes the first ones that are ready.

    A sequence that has begun is in every step until it leaves, unless `max_batch` others come before it.
    """

    def __init__(self, max_batch: int) -> None:
        assert max_batch >= 1, max_batch
        self._max_batch = max_batch
        self._order: list[tuple[Place, str]] = []
        self._places: dict[str, Place] = {}

    @property
    def num_running(self) -> int:
        """That have a place."""
        return min(len(self._order), self._max_batch)

    @property
    def num_waiting(self) -> int:
        return len(self._order) - self.num_running

    def join(self, name: str, place: Place) -> None:
        """`place`: one that comes back has its old one."""
        assert name not in self._places, name
        self._places[name] = place
        bisect.insort(self._order, (place, name))

    def leave(self, names: Iterable[str]) -> None:
        """Unknown names are ignored."""
        for name in names:
            place = self._places.pop(name, None)
            if place is not None:
                self._order.remove((place, name))

    def next_step(self, is_ready: Callable[[str], bool] = lambda name: True) -> list[str]:
        """The members of the next step. While one is not ready, as it waits for blocks, another takes its place."""
        members: list[str] = []
        for _, name in self._order:
            if len(members) == self._max_batch:
                break
            if is_ready(name):
                members.append(name)
        return members
