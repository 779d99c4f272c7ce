"""What a drill's observations amount to: figures, and which expectations were met. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pd_ops.drills.catalog import Drill
from pd_ops.drills.observer import Sighting, falsely_lost, seen_lost
from pd_ops.drills.report import DrillResult, Expectation, Figures
from pd_ops.drills.scene import Broken
from pd_ops.drills.traffic import Asked
from pd_ops.latency import LatencySummary, summarize

MAX_SHOWN = 3  # errors of a kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Attributes:
    asked: all requests; `steady`: those of the steady traffic.
    differences: from one process, by id() of what was asked.
    sizes: ready workers by role before anything was broken.
    full_s: when as many were ready again; None: not in time.
    is_mended: whether what the cluster did without is back; None: there was nothing.
    may_be_too_much: the load is one that the cluster may refuse some of, whole or not.
    """

    asked: Sequence[Asked]
    steady: Sequence[Asked]
    differences: Mapping[int, str]
    num_leaked_blocks: int | None
    sizes: Mapping[str, int]
    sightings: Sequence[Sighting]
    broken: Broken
    full_s: float | None
    is_mended: bool | None
    may_be_too_much: bool = False


def judge(name: str, drill: Drill, seen: Observed, *, seconds: float, load: float) -> DrillResult:
    figures = _figures(drill, seen)
    return DrillResult(
        name=name, sentence=drill.sentence, targets=(seen.broken.target,) if seen.broken.target else (),
        figures=figures, expectations=tuple(_expectations(drill, seen, figures)),
        details=(*seen.broken.details, *_first_errors(seen)), seconds=seconds, load=load,
    )


def not_run(name: str, drill: Drill, reason: str, *, seconds: float, load: float) -> DrillResult:
    """Of a drill that could not be done, or not be finished: it has failed, and measured nothing."""
    return DrillResult(
        name=name, sentence=drill.sentence, targets=(), figures=Figures(), details=(), seconds=seconds, load=load,
        expectations=(Expectation(name="the drill can be done", is_met=False, found=reason),),
    )


def _figures(drill: Drill, seen: Observed) -> Figures:
    broken = seen.broken
    lost_s = seen_lost(seen.sightings, broken.target, broken.epoch, broken.at_s) if drill.is_noticed else None
    until_s = seen.full_s if seen.full_s is not None else float("inf")
    met = [one for one in seen.steady if one.start_s < until_s and (one.end_s or until_s) > broken.at_s]
    before = [one for one in seen.steady if one.end_s is not None and one.end_s <= broken.at_s]
    gaps, normal = _gaps(met), _gaps(before)
    from_s = broken.at_s if drill.is_noticed else broken.is_over_s
    return Figures(
        num_requests=len(seen.asked),
        num_tokens=sum(len(one.token_ids) for one in seen.asked),
        num_lost=sum(one.outcome is None for one in seen.asked),
        num_wrong=len(seen.differences),
        num_refused=sum(one.num_refused for one in seen.asked),
        num_broken=sum(one.num_broken for one in seen.asked),
        num_leaked_blocks=seen.num_leaked_blocks,
        detection_s=None if lost_s is None else lost_s - broken.at_s,
        full_capacity_s=None if seen.full_s is None else seen.full_s - from_s,
        gap_p50_ms=gaps.p50_ms, gap_p99_ms=gaps.p99_ms, normal_gap_p99_ms=normal.p99_ms,
    )


def _gaps(asked: Sequence[Asked]) -> LatencySummary:
    return summarize([one.largest_gap_ms() for one in asked])


def _expectations(drill: Drill, seen: Observed, figures: Figures) -> list[Expectation]:
    leaked = figures.num_leaked_blocks
    expectations = [
        _none("no request is lost", figures.num_lost),
        _none("no answer differs from one process", figures.num_wrong),
        Expectation(
            name="no block is held afterwards", is_met=leaked == 0,
            found="the router did not answer" if leaked is None else str(leaked),
        ),
        Expectation(
            name="both pools are whole again", is_met=seen.full_s is not None,
            found="not in time" if figures.full_capacity_s is None else f"after {figures.full_capacity_s:.2f} s",
        ),
    ]
    if not drill.breaks_streams:
        expectations.append(_none("no stream is cut", figures.num_broken))
    may_refuse = drill.refuses or seen.may_be_too_much
    if not may_refuse and (not drill.role or seen.sizes[drill.role] > 1):
        expectations.append(_none("no request is refused", figures.num_refused))
    if drill.is_noticed:
        found = "not" if figures.detection_s is None else f"after {figures.detection_s:.3f} s"
        expectations.append(
            Expectation(name="the router notices", is_met=figures.detection_s is not None, found=found)
        )
    if seen.is_mended is not None:
        found = "yes" if seen.is_mended else "not in time"
        expectations.append(Expectation(name="all hosts are back", is_met=seen.is_mended, found=found))
    if drill.spares_others:
        others = falsely_lost(seen.sightings, {seen.broken.target or "", *seen.broken.also}, seen.broken.at_s)
        expectations.append(Expectation(
            name="nobody else is taken for lost", is_met=not others, found=", ".join(others) or "nobody"
        ))
    return expectations


def _none(name: str, count: int | None) -> Expectation:
    return Expectation(name=name, is_met=count == 0, found=str(count))


def _first_errors(seen: Observed) -> list[str]:
    lost = [f"lost: {one.error or 'it was still waiting'}" for one in seen.asked if one.outcome is None]
    wrong = [f"wrong: {text}" for text in seen.differences.values()]
    reasons = Counter(reason for one in seen.asked for reason in one.interruptions)
    again = [f"asked again {count} times: {reason}" for reason, count in reasons.most_common(MAX_SHOWN)]
    return [*lost[:MAX_SHOWN], *wrong[:MAX_SHOWN], *again]
