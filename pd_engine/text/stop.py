"""Stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from typing import NamedTuple


class StopStep(NamedTuple):
    """Text that is now certain to be shown, and the stop string that was completed, if any."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the stop string that is completed first (of several at the same character, the longest), and holds back
    no more text than could still become part of one. How the text is cut into pieces changes nothing.

    A stop string counts only if the piece in which it is completed may end the text; until then it is text."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        assert all(stop), stop
        self._stop = stop
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> StopStep:
        """Adds text. After a match the matcher is spent: the text before the match has been given out."""
        if not self._stop:
            return StopStep(text)
        pending = self._held + text
        match = self._first_match(pending) if may_end else None
        if match is not None:
            start, stop = match
            self._held = ""
            return StopStep(pending[:start], stop)
        num_held = max(_overlap(pending, stop) for stop in self._stop)
        self._held = pending[len(pending) - num_held :]
        return StopStep(pending[: len(pending) - num_held])

    def _first_match(self, pending: str) -> tuple[int, str] | None:
        """(start, stop string) of the one that is completed first, behind what was held back."""
        matches = []
        for stop in self._stop:
            start = pending.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches)[1:] if matches else None

    def finish(self) -> str:
        """The text that was held back, as no stop string was completed."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
