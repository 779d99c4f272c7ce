"""What `bench layers` reports: parts of a level, and what share of it they explain. Pure.

A level is measured by itself, and so is each of its parts: what the parts leave unexplained is what lies between them.
Shares of a busy machine may add up to more than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from pd_ops.bench.measured_process import Document
from pd_ops.tables import table


class Level(Enum):
    """Each is a part of the next."""

    OP = "op"            # all calls of one sort in a layer
    LAYER = "layer"      # the mean one
    FORWARD = "forward"  # the main model, its head included, over the rows of a step or of all chunks of a prompt
    STEP = "step"        # a decode step, or a prompt up to its first token
    CLIENT = "client"    # between two tokens, or until the first, through a router and two workers


_LEVELS = tuple(Level)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Milliseconds of one part, `count` of which are in one of the level's wholes."""

    level: Level
    name: str
    ms: float
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Attributes:
    case: such as "decode, batch 4, context 512".
    level, part: what was measured, `count` of which are in one whole of the next level.
    ms: of one.
    of: the next level; None: there is none.
    share: of the next level, by all `count` together; None: there is none, or it was not measured.
    """

    case: str
    level: str
    part: str
    count: int
    ms: float
    of: str | None
    share: float | None

    def to_json(self) -> Document:
        return asdict(self)


def rows(case: str, parts: Sequence[Part], wholes_ms: Mapping[Level, float]) -> list[Row]:
    """In the order of levels; `wholes_ms` has what each level that was measured took as a whole."""
    found = []
    for part in sorted(parts, key=lambda one: _LEVELS.index(one.level)):
        above = _next(part.level)
        whole_ms = None if above is None else wholes_ms.get(above)
        found.append(Row(
            case=case, level=part.level.value, part=part.name, count=part.count, ms=part.ms,
            of=None if above is None else above.value,
            share=part.count * part.ms / whole_ms if whole_ms else None,
        ))
    return found


def explained(found: Sequence[Row]) -> dict[tuple[str, str], float]:
    """By case and level: what all its measured parts explain of it."""
    sums: dict[tuple[str, str], float] = {}
    for row in found:
        if row.of is not None and row.share is not None:
            sums[row.case, row.of] = sums.get((row.case, row.of), 0.0) + row.share
    return sums


def rows_text(found: Sequence[Row]) -> str:
    """For people: a line a part, and what its level leaves open."""
    lines: list[tuple[str, str, str, str, str]] = []
    sums = explained(found)
    for number, row in enumerate(found):
        of = "" if row.share is None else f"{row.share:.1%} of a {row.of}"
        lines.append((row.case, row.level, row.part, f"{row.count} x {row.ms:.3f} ms", of))
        following = found[number + 1] if number + 1 < len(found) else None
        if row.share is not None and (following is None or (following.case, following.of) != (row.case, row.of)):
            rest = 1 - sums[row.case, row.of or ""]
            lines.append((row.case, "", "(the rest)", "", f"{rest:.1%} of a {row.of}"))
    return table(("case", "level", "part", "time", "share"), lines)


def _next(level: Level) -> Level | None:
    at = _LEVELS.index(level) + 1
    return _LEVELS[at] if at < len(_LEVELS) else None
