"""Which sequences the next step decodes. Pure: continuous batching, members change at every step."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable


class Batch:
    """Names of sequences in order of their arrival: each step takes the first ones that are ready.

    A sequence that has begun keeps its place until it leaves, unless an older one comes back.
    """

    def __init__(self, max_batch: int) -> None:
        assert max_batch >= 1, max_batch
        self._max_batch = max_batch
        self._order: list[tuple[int, str]] = []  # (arrival, name)
        self._arrivals: dict[str, int] = {}

    @property
    def num_running(self) -> int:
        """That have a place."""
        return min(len(self._order), self._max_batch)

    @property
    def num_waiting(self) -> int:
        return len(self._order) - self.num_running

    def join(self, name: str, arrival: int) -> None:
        """`arrival`: a number that only ever grows; one that comes back has its old one."""
        assert name not in self._arrivals, name
        self._arrivals[name] = arrival
        bisect.insort(self._order, (arrival, name))

    def leave(self, names: Iterable[str]) -> None:
        """Unknown names are ignored."""
        for name in names:
            arrival = self._arrivals.pop(name, None)
            if arrival is not None:
                self._order.remove((arrival, name))

    def next_step(self, is_ready: Callable[[str], bool] = lambda name: True) -> list[str]:
        """The members of the next step. While one is not ready, as it waits for blocks, another takes its place."""
        members: list[str] = []
        for _, name in self._order:
            if len(members) == self._max_batch:
                break
            if is_ready(name):
                members.append(name)
        return members
