"""What a request keeps, and what a handoff has to move, as components whose rows depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Rows(Enum):
    """How many rows N tokens have, given the component's `size`."""

    FIXED = "size rows, whatever N"
    WINDOW = "min(N, size)"
    ENTRIES = "one for each size tokens: floor(N / size)"
    REMAINDER = "N mod size"
    OVERLAP = "one once N has reached size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """`row_bytes`: of one row in one layer."""

    name: str
    part: str
    num_layers: int
    row_bytes: int
    rows: Rows
    size: int

    def num_rows(self, num_tokens: int) -> int:
        """In one layer."""
        match self.rows:
            case Rows.FIXED:
                return self.size
            case Rows.WINDOW:
                return min(num_tokens, self.size)
            case Rows.ENTRIES:
                return num_tokens // self.size
            case Rows.REMAINDER:
                return num_tokens % self.size
            case Rows.OVERLAP:
                return int(num_tokens >= self.size)

    def num_bytes(self, num_tokens: int) -> int:
        return self.num_layers * self.row_bytes * self.num_rows(num_tokens)


def total_bytes(components: Iterable[Component], num_tokens: int, part: str | None = None) -> int:
    """Of all components, or of those of one part."""
    return sum(one.num_bytes(num_tokens) for one in components if part is None or one.part == part)
