"""Which sequences the next step decodes. Pure: continuous batching, members change at every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Batch:
    """Names of sequences: those in the batch, and those that wait for a place in it, first come first served.

    A sequence that has begun keeps its place until it leaves: it is never set back for another one.
    """

    def __init__(self, max_batch: int) -> None:
        assert max_batch >= 1, max_batch
        self._max_batch = max_batch
        self._members: dict[str, None] = {}  # in order of joining
        self._waiting: deque[str] = deque()

    @property
    def num_running(self) -> int:
        return len(self._members)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def join(self, name: str) -> None:
        assert name not in self._members and name not in self._waiting, name
        self._waiting.append(name)

    def leave(self, names: Iterable[str]) -> None:
        """Members or waiting ones; unknown names are ignored."""
        for name in names:
            if name in self._members:
                del self._members[name]
            elif name in self._waiting:
                self._waiting.remove(name)

    def next_step(self) -> list[str]:
        """The members of the next step; those who wait join while there is a place."""
        while self._waiting and len(self._members) < self._max_batch:
            self._members[self._waiting.popleft()] = None
        return list(self._members)
