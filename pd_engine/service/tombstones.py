"""What was released before it arrived: a late `Reserve` or `Prefill` of it is answered "gone". Pure; time passed in."""

from __future__ import annotations

LONGEST_MESSAGE_LIFE_S = 60.0
MAX_TOMBSTONES = 100_000


class Tombstones:
    """The highest released attempt of each journey, kept for the longest life of a message."""

    def __init__(self, life_s: float = LONGEST_MESSAGE_LIFE_S, max_entries: int = MAX_TOMBSTONES) -> None:
        self._life_s = life_s
        self._max_entries = max_entries
        self._entries: dict[str, tuple[int, float]] = {}  # journey -> (attempt, forget at), oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def bury(self, journey_id: str, up_to_attempt: int, now_s: float) -> None:
        """From now on attempts up to this one are gone."""
        attempt, _ = self._entries.pop(journey_id, (0, 0.0))
        self._entries[journey_id] = (max(attempt, up_to_attempt), now_s + self._life_s)
        while len(self._entries) > self._max_entries:
            del self._entries[next(iter(self._entries))]

    def is_gone(self, journey_id: str, attempt: int) -> bool:
        return attempt <= self._entries.get(journey_id, (0, 0.0))[0]

    def tick(self, now_s: float) -> None:
        """Forgets those whose time is over."""
        while self._entries:
            journey_id, (_, forget_at_s) = next(iter(self._entries.items()))
            if forget_at_s > now_s:
                return
            del self._entries[journey_id]
