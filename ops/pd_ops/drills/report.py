"""What a drill found: figures, expectations that were met or not, as Markdown and JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """Something that must be so. `found` in words, with the figure."""

    name: str
    is_met: bool
    found: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was measured; None where there was nothing to measure. Gaps are the largest pause of each stream that ran
    when it happened, or began before the pools were whole again.

    Attributes:
        num_refused: answers "not now"; the client asked again.
        num_broken: streams that were cut; the client asked again, and went on where it was.
        num_leaked_blocks: that were not free again after the last request.
        detection_s: until the router took the target for lost.
        full_capacity_s: until both pools had as many ready workers as before; from its end where none is to be lost.
    """

    num_requests: int | None = None
    num_tokens: int | None = None
    num_lost: int | None = None
    num_wrong: int | None = None
    num_refused: int | None = None
    num_broken: int | None = None
    num_leaked_blocks: int | None = None
    detection_s: float | None = None
    full_capacity_s: float | None = None
    gap_p50_ms: float | None = None
    gap_p99_ms: float | None = None
    normal_gap_p99_ms: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillResult:
    """`load`: of the host that drills, the average of the last minute when it was over."""

    name: str
    sentence: str
    targets: tuple[str, ...]
    figures: Figures
    expectations: tuple[Expectation, ...]
    details: tuple[str, ...]
    seconds: float
    load: float

    @property
    def passed(self) -> bool:
        return all(one.is_met for one in self.expectations)

    def to_json(self) -> dict[str, Any]:
        figures = {name: _rounded(getattr(self.figures, name)) for name in Figures.__dataclass_fields__}
        return {
            "name": self.name, "what": self.sentence, "targets": list(self.targets), "passed": self.passed, **figures,
            "expectations": [{"name": one.name, "met": one.is_met, "found": one.found} for one in self.expectations],
            "details": list(self.details), "seconds": round(self.seconds, 1), "load": round(self.load, 1),
        }


def summary(results: Sequence[DrillResult], cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Args:
    cluster: what was drilled: `cluster, model, pools, clients, trace, rate_per_s`.
    """
    return {
        **cluster, "passed": all(one.passed for one in results) and bool(results),
        "drills": [one.to_json() for one in results],
    }


def to_markdown(document: Mapping[str, Any], when: str) -> str:
    """The report of a `summary`."""
    pools = " + ".join(f"{size} {role}" for role, size in document["pools"].items())
    lines = [
        "# Drills", "",
        f"Cluster `{document['cluster']}`, {pools} workers, model `{document['model']}`, {_load(document)}; {when}. "
        f"{'All passed.' if document['passed'] else '**Not passed.**'}", "",
        "| drill | | requests | lost | wrong | refused | broken, resumed | blocks leaked | detected | full again "
        "| gap p50 | p99 | else p99 | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(drill) for drill in document["drills"]), "",
        "A gap is the largest pause of a stream that met the failure; \"else\" are the streams before it; load is that "
        "of the host that drills, in the last minute.", "",
    ]
    for drill in document["drills"]:
        lines += [f"## {drill['name']}", "", f"{drill['what']} ({', '.join(drill['targets']) or 'the cluster'})", ""]
        lines += [f"- {'met' if one['met'] else '**not met**'}: {one['name']}: {one['found']}"
                  for one in drill["expectations"]]
        lines += [*(f"- {detail}" for detail in drill["details"]), ""]
    return "\n".join(lines)


def _load(document: Mapping[str, Any]) -> str:
    if document["trace"] is None:
        return f"{document['clients']} clients that ask without a pause"
    return f"requests of the trace `{document['trace']}` when they are due, {document['rate_per_s']} a second"


def _row(drill: Mapping[str, Any]) -> str:
    cells = [
        drill["name"], "passed" if drill["passed"] else "**failed**",
        *(_cell(drill[name]) for name in (
            "num_requests", "num_lost", "num_wrong", "num_refused", "num_broken", "num_leaked_blocks",
        )),
        _cell(drill["detection_s"], " s"), _cell(drill["full_capacity_s"], " s"), _cell(drill["gap_p50_ms"], " ms"),
        _cell(drill["gap_p99_ms"], " ms"), _cell(drill["normal_gap_p99_ms"], " ms"), _cell(drill["load"]),
    ]
    return f"| {' | '.join(cells)} |"


def _cell(value: object, unit: str = "") -> str:
    return "-" if value is None else f"{value}{unit}"


def _rounded(value: float | None) -> float | None:
    return round(value, 2) if isinstance(value, float) else value
