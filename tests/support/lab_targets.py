"""What the drills are to reach in the lab, and whether a run did. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KILLED_PROCESS = ("kill-prefill", "kill-decode", "kill-router")
COUNTS = ("num_lost", "num_wrong", "num_leaked_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`drills`: that it is measured in; none: all. `limit`: of the figure, in the unit of its name."""

    what: str
    figure: str
    limit: float
    unit: str = ""
    drills: Collection[str] = ()


TARGETS = (
    *(Target(what=f"{figure.removeprefix('num_').replace('_', ' ')}, in every drill", figure=figure, limit=0)
      for figure in COUNTS),
    Target(what="a cut link is noticed", drills=("cut-host",), figure="detection_s", limit=2.5, unit=" s"),
    Target(what="a killed process is noticed", drills=KILLED_PROCESS, figure="detection_s", limit=0.1, unit=" s"),
    Target(
        what="the largest pause of clients' streams, p99, decode worker killed", drills=("kill-decode",),
        figure="gap_p99_ms", limit=3_000, unit=" ms",
    ),
    Target(
        what="all workers are back, host killed, with a spare", drills=("kill-host",), figure="full_capacity_s",
        limit=15, unit=" s",
    ),
)


def target_lines(drills: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table in Markdown. `drills`: as `pd-relay drill --json` has them."""
    return [
        "## What it is to reach", "",
        "| | at most | found | |", "|---|---|---|---|", *(_row(target, drills) for target in TARGETS), "",
    ]


def _row(target: Target, drills: Sequence[Mapping[str, Any]]) -> str:
    measured = [one for one in drills if not target.drills or one["name"] in target.drills]
    values = [one[target.figure] for one in measured]
    is_met = bool(values) and all(value is not None and value <= target.limit for value in values)
    verdict = "not run" if not measured else "reached" if is_met else "**missed**"
    return f"| {target.what} | {target.limit:g}{target.unit} | {_found(target, measured)} | {verdict} |"


def _found(target: Target, measured: Sequence[Mapping[str, Any]]) -> str:
    if not target.drills and all(one[target.figure] == 0 for one in measured):
        return "0"
    return ", ".join(f"{one['name']} {_text(one[target.figure], target.unit)}" for one in measured) or "-"


def _text(value: float | None, unit: str) -> str:
    return "not measured" if value is None else f"{value:g}{unit}"
