"""A request's time, cut into parts that follow each other, from what was seen of it from outside. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pd_ops.bench.serve.record import Record

MAX_POINTS = 60  # of which all pairs are tried
FEWEST_FOR_A_LINE = 10

class Part(Enum):
    """In the order of the questions.

    QUEUE: until sent, and what of a first token's time neither its prompt nor the fixed part explains. PREFILL: its
    uncached tokens at the measured rate. ROUTER: the fixed part (doors, router, beginning of a handoff), and the end
    of the stream. LINK: what a second token comes later than usual. DECODE: the rest after the first token. ROOM is no
    stretch of time.
    """

    QUEUE = "queue"
    ROOM = "room"
    PREFILL = "prefill rate"
    LINK = "link"
    DECODE = "decode step"
    ROUTER = "router"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """First tokens over what their prompts had to compute: `fixed_ms` + `ms_per_token` of uncached ones + `ms_per_pair`
    of each of these with every token before it."""

    fixed_ms: float
    ms_per_token: float
    ms_per_pair: float = 0.0

    def prompt_ms(self, record: Record) -> float:
        """Without the fixed part."""
        return self.ms_per_token * uncached_tokens(record) + self.ms_per_pair * num_pairs(record)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Milliseconds of one request, by part. They add up to its whole time."""

    record: Record
    parts: dict[Part, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def prefill_rate(records: Sequence[Record]) -> Rate:
    """The line through two of the points that fits them best: their middle, or, where the endpoint tells no queue, the
    tenth that waited least, since a queue makes first tokens later and never earlier. Of a few requests only a rate is
    told, and nothing fixed: no line through them can be trusted."""
    chosen = records[:: -(-len(records) // MAX_POINTS)]
    points = [(uncached_tokens(one), max(0.0, served_ttft_ms(one) - (one.queue_ms or 0.0))) for one in chosen]
    share = 0.5 if all(one.queue_ms is not None for one in chosen) else 0.1
    if len(points) < FEWEST_FOR_A_LINE:
        rates = sorted(y / x for x, y in points if x)
        return Rate(fixed_ms=0.0, ms_per_token=rates[int(share * len(rates))] if rates else 0.0)
    lines = {(0.0, y) for _, y in points}
    for (x1, y1), (x2, y2) in itertools.combinations(points, 2):
        slope = (y2 - y1) / (x2 - x1) if x2 != x1 else -1.0
        if slope >= 0 and y1 >= slope * x1:
            lines.add((slope, y1 - slope * x1))
    slope, fixed = min(lines, key=lambda line: (_misfit(points, line[0], line[1], share), line))
    return Rate(fixed_ms=fixed, ms_per_token=slope)


def _misfit(points: Sequence[tuple[int, float]], slope: float, fixed: float, share: float) -> float:
    """Of quantile regression (Koenker and Bassett, 1978): distances, those below the line weighing 1 - share."""
    rests = [y - fixed - slope * x for x, y in points]
    return sum(rest * share if rest > 0 else rest * (share - 1) for rest in rests)


def cut(record: Record, rate: Rate) -> Times:
    """A request's time by part. Without a queue time from the endpoint, the queue is what its prompt's own computation
    and the fixed part do not explain."""
    ttft = served_ttft_ms(record)
    fixed = min(ttft, rate.fixed_ms)
    prefill = min(ttft - fixed, rate.prompt_ms(record))
    queue = ttft - fixed - prefill
    gap, steps = _after_first(record)
    return Times(record=record, parts={
        Part.QUEUE: max(0.0, record.lag_ms) + queue, Part.PREFILL: prefill, Part.LINK: gap, Part.DECODE: steps,
        Part.ROUTER: fixed + max(0.0, 1e3 * (record.end_s - record.arrivals[-1][0])),
    })


def served_ttft_ms(record: Record) -> float:
    """From when it was sent."""
    return max(0.0, 1e3 * (record.arrivals[0][0] - record.sent_s))


def uncached_tokens(record: Record) -> int:
    return record.prompt_tokens - (record.num_cached_tokens or 0)


def num_pairs(record: Record) -> float:
    """Of each token to compute with every one before it, cached or not."""
    return (record.prompt_tokens**2 - (record.num_cached_tokens or 0) ** 2) / 2


def _after_first(record: Record) -> tuple[float, float]:
    """(what the second token waited beyond a usual gap, the rest), ms."""
    whole = 1e3 * (record.arrivals[-1][0] - record.arrivals[0][0])
    gap = record.handoff_wait_ms or 0.0
    return gap, whole - gap
