"""Where the time of requests went, in the order in which a good engineer asks, and what a part twice as fast is worth.

What a part is worth is counted on each request alone: that a faster part would empty queues too is left out, so it is
worth that at least.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.record import Record
from pd_ops.bench.serve.request_parts import Part, Rate, Times, cut, prefill_rate, uncached_tokens
from pd_ops.bench.serve.result import Result
from pd_ops.bench.serve.summary import Targets
from pd_ops.output import Document

FEWEST = 5  # requests that a diagnosis needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One question's answer.

    Attributes:
        share: of the mean request's time; None: it is no stretch of a request's time (room).
        evidence: sentences with figures.
        faster_ms: what the mean request would gain if the part took half as long, all else as it was.
        more_good: how many more requests would have met the targets.
    """

    part: Part
    share: float | None
    evidence: tuple[str, ...]
    faster_ms: float | None
    more_good: int | None

    def to_json(self) -> Document:
        return {
            "part": self.part.value, "share": self.share, "evidence": list(self.evidence),
            "faster_ms": self.faster_ms, "more_good": self.more_good,
        }


def diagnose(result: Result) -> list[Finding]:
    """In the order of `Part`.

    Raises:
        InvalidArgument: the records are not there, or too few requests finished.
    """
    known = [record for record in result.finished if record.arrivals]
    if len(known) < FEWEST:
        raise InvalidArgument(
            f"{result.path}: a diagnosis needs its records.jsonl with at least {FEWEST} finished requests, "
            f"there are {len(known)}"
        )
    rate = _rate(result, known)
    times = [cut(record, rate) for record in known]
    evidence: dict[Part, Callable[[], tuple[str, ...]]] = {
        Part.QUEUE: lambda: _queue(times), Part.ROOM: lambda: _room(result),
        Part.PREFILL: lambda: _prefill(times, rate), Part.LINK: lambda: _link(times),
        Part.DECODE: lambda: _decode(times), Part.ROUTER: lambda: _router(times, rate),
    }
    return [_finding(part, evidence[part](), times, result.targets) for part in Part]


def _rate(result: Result, known: Sequence[Record]) -> Rate:
    """By how long prompts kept prefill workers busy, of a pd-relay that was idle now and then; else a line through
    first tokens, less the queue that was told."""
    topology = result.identity.get("topology") or {}
    num_workers = topology.get("prefill") or topology.get("decode")
    if isinstance(num_workers, int) and num_workers > 0 and all(record.queue_ms is not None for record in known):
        from pd_ops.bench.serve.prompt_costs import FEWEST_STRETCHES, prompt_costs

        costs = prompt_costs(known, num_workers)
        if costs.num_stretches >= FEWEST_STRETCHES and costs.tells_doors:
            return Rate(fixed_ms=costs.door_ms, ms_per_token=costs.ms_per_token, ms_per_pair=costs.ms_per_pair)
    return prefill_rate(known)


def largest(findings: Sequence[Finding]) -> Finding:
    """Of those that are a stretch of time."""
    return max((one for one in findings if one.share is not None), key=lambda one: one.share or 0.0)


def _finding(part: Part, evidence: tuple[str, ...], times: Sequence[Times], targets: Targets) -> Finding:
    if part is Part.ROOM:
        return Finding(part=part, share=None, evidence=evidence, faster_ms=None, more_good=None)
    total, mine = sum(one.total for one in times), sum(one.parts[part] for one in times)
    met = sum(targets.are_met(one.record) for one in times)
    gained = sum(_good_if_halved(one, part, targets) for one in times) - met
    return Finding(part=part, share=mine / total if total else 0.0, evidence=evidence,
                   faster_ms=mine / len(times) / 2, more_good=gained)


def _good_if_halved(times: Times, part: Part, targets: Targets) -> bool:
    """Whether the request would have met the targets with half of that part."""
    if targets.are_met(times.record):
        return True
    record, saved_s = times.record, times.parts[part] / 2e3
    arrivals = record.arrivals
    match part:
        case Part.LINK:
            moved = (arrivals[0], *((at - saved_s, count) for at, count in arrivals[1:]))
        case Part.DECODE:
            first = arrivals[0][0]
            moved = tuple((first + (at - first) / 2, count) for at, count in arrivals)
        case Part.ROUTER:  # the end of a stream is in it, which comes after all tokens
            saved_s = max(0.0, saved_s - (record.end_s - arrivals[-1][0]) / 2)
            moved = tuple((at - saved_s, count) for at, count in arrivals)
        case _:
            moved = tuple((at - saved_s, count) for at, count in arrivals)
    return targets.are_met(replace(record, arrivals=moved))


def _queue(times: Sequence[Times]) -> tuple[str, ...]:
    waits = [one.parts[Part.QUEUE] for one in times]
    ordered = sorted(times, key=lambda one: one.record.intended_s)
    third = max(1, len(ordered) // 3)
    first, last = (
        statistics.mean(one.parts[Part.QUEUE] for one in some) for some in (ordered[:third], ordered[-third:])
    )
    trend = "it grew" if last > 2 * first + 1 else "it did not grow"
    told = [one.record.queue_ms for one in times if one.record.queue_ms is not None]
    lines = [f"waiting took {statistics.mean(waits):.0f} ms on average, {max(waits):.0f} ms at most",
             f"{first:.0f} ms in the first third, {last:.0f} ms in the last: {trend}"]
    if told:
        lines.append(f"the router expected {statistics.mean(told):.0f} ms")
    return tuple(lines)


def _room(result: Result) -> tuple[str, ...]:
    summary, samples = result.summary, result.document.get("pools") or []
    lines = [f"{summary['refused']} of {summary['requests']} requests were refused"]
    for role in ("prefill", "decode"):
        pools = [sample[role] for sample in samples if sample[role]["num_blocks_total"]]
        if pools:
            least = min(pool["num_blocks_free"] / pool["num_blocks_total"] for pool in pools)
            moves = pools[-1]["num_moves_total"] - pools[0]["num_moves_total"]
            again = pools[-1]["num_recomputed_total"] - pools[0]["num_recomputed_total"]
            lines.append(f"{role}: at least {least:.0%} of blocks were free, {moves} moves to host memory, "
                         f"{again} computed again")
    return tuple(lines) if samples else (*lines, "the endpoint told nothing of its pools")


def _prefill(times: Sequence[Times], rate: Rate) -> tuple[str, ...]:
    tokens = [uncached_tokens(one.record) for one in times]
    total_ms = sum(rate.prompt_ms(one.record) for one in times)
    if not total_ms:
        return ("first tokens did not come later for longer prompts",)
    return (f"{1e3 * sum(tokens) / total_ms:,.0f} uncached prompt tokens a second, as first tokens show; "
            f"{statistics.mean(tokens):,.0f} a request",)


def _link(times: Sequence[Times]) -> tuple[str, ...]:
    moved = [one.record for one in times if one.record.handoff_bytes is not None]
    if not moved:
        return ("no request tells of a handoff",)
    total = sum(one.handoff_bytes or 0 for one in moved)
    exposed = total - sum(one.hidden_bytes or 0 for one in moved)
    gaps = [one.parts[Part.LINK] for one in times]
    return (f"{exposed / total if total else 0.0:.1%} of {total / 2**20:,.1f} MiB moved after the prompt was computed",
            f"the second token came {statistics.mean(gaps):.1f} ms later than a usual one")


def _decode(times: Sequence[Times]) -> tuple[str, ...]:
    itl = [value for one in times for value in one.record.timing.itl_ms]
    drafted = sum(one.record.num_drafted or 0 for one in times)
    lines = [f"{statistics.median(itl):.1f} ms between tokens (median)" if itl else "no answer had a second token"]
    if drafted:
        accepted = sum(one.record.num_accepted or 0 for one in times)
        lines.append(f"{accepted / drafted:.0%} of drafts were accepted")
    return tuple(lines)


def _router(times: Sequence[Times], rate: Rate) -> tuple[str, ...]:
    lags = sorted(one.record.lag_ms for one in times)
    return (f"{rate.fixed_ms:.1f} ms of a first token hang neither on the prompt nor on the queue",
            f"the generator itself was {lags[len(lags) // 2]:.1f} ms late (median; counted as queue)")
