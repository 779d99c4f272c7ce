"""Stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStep:
    """Text that is now certain to be shown, and the stop string that was completed, if any."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the stop string that is completed first (of several at the same character, the longest), and holds back
    no more text than could still become part of one. How the text is cut into pieces changes nothing."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        assert all(stop), stop
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> StopStep:
        """Adds text. After a match the matcher is spent: the text before the match has been given out."""
        if not self._stop:
            return StopStep(text)
        pending = self._held + text
        match = min(
            ((start + len(stop), start, stop) for stop in self._stop if (start := pending.find(stop)) >= 0),
            default=None,
        )
        if match is not None:
            _, start, stop = match
            self._held = ""
            return StopStep(pending[:start], stop)
        num_held = max(_overlap(pending, stop) for stop in self._stop)
        self._held = pending[len(pending) - num_held :]
        return StopStep(pending[: len(pending) - num_held])

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
