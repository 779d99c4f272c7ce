"""What happened in a world, in order: a line for each event that a reader needs to follow it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

MAX_TOLD = 5_000  # lines, the last ones: a story that does not end has many


class Line(NamedTuple):
    """`who`: a process with its life, or "world". `is_routine`: left out when the story is told."""

    at_s: float
    who: str
    text: str
    is_routine: bool = False


class Story:
    """Attributes:
    lines: so far.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(self, at_s: float, who: str, text: str, *, is_routine: bool = False) -> None:
        self.lines.append(Line(at_s, who, text, is_routine))

    def tell(self) -> str:
        """Seconds, who, what."""
        lines = [line for line in self.lines if not line.is_routine]
        told = [f"{line.at_s:9.4f}  {line.who:<12} {line.text}" for line in lines[-MAX_TOLD:]]
        return "\n".join([f"{len(lines) - MAX_TOLD} lines before", *told] if len(lines) > MAX_TOLD else told)

    def digest(self) -> str:
        """Of every line, the routine ones too: two runs of one seed have the same."""
        content = "\n".join(f"{line.at_s!r} {line.who} {line.text}" for line in self.lines)
        return hashlib.sha256(content.encode()).hexdigest()
