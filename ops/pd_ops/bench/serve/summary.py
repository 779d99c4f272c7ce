"""What records say: goodput, refusals, percentiles in all and by size, tokens, drafts, caches. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from pd_ops.bench.serve.record import Outcome, Record
from pd_ops.output import Document

PROMPT_EDGES = (64, 256, 1024, 4096, 16_384, 65_536)
OUTPUT_EDGES = (16, 64, 256, 1024, 4096)
MOST_ERRORS = 5


class ItlOf(Enum):
    """Which number of a request's times between tokens has to meet the target."""

    MEAN = "mean"
    P99 = "p99"
    MAX = "max"


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """None: any time will do."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    itl_of: ItlOf = ItlOf.MEAN

    def are_met(self, record: Record) -> bool:
        """Only by a request that finished, with a token at least."""
        ttft = record.timing.ttft_ms
        if record.outcome is not Outcome.FINISHED or ttft is None:
            return False
        if self.ttft_ms is not None and ttft > self.ttft_ms:
            return False
        itl = record.timing.itl_ms
        return self.itl_ms is None or not itl or _itl(itl, self.itl_of) <= self.itl_ms

    def to_json(self) -> Document:
        return {"ttft_ms": self.ttft_ms, "itl_ms": self.itl_ms, "itl_of": self.itl_of.value}


def _itl(itl_ms: Sequence[float], of: ItlOf) -> float:
    match of:
        case ItlOf.MEAN:
            return sum(itl_ms) / len(itl_ms)
        case ItlOf.P99:
            return percentile(sorted(itl_ms), 0.99)
        case ItlOf.MAX:
            return max(itl_ms)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between ranks; of at least one value in ascending order."""
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Of some samples; None without one."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        ordered = sorted(samples)
        if not ordered:
            return cls(count=0)
        p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
        return cls(count=len(ordered), mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p95=p95, p99=p99,
                   most=ordered[-1])

    def to_json(self) -> Document:
        return asdict(self)


def summarize(records: Sequence[Record], targets: Targets, *, span_s: float) -> Document:
    """The documented keys.

    Args:
        span_s: from the beginning of the measurement to its end.
    """
    finished = [record for record in records if record.outcome is Outcome.FINISHED]
    good = [record for record in finished if targets.are_met(record)]
    outcomes = {outcome.value: sum(record.outcome is outcome for record in records) for outcome in Outcome}
    prompt, output = (sum(counts) for counts in (
        [record.prompt_tokens for record in finished], [record.completion_tokens for record in finished]
    ))
    cached = _total(finished, lambda one: one.num_cached_tokens)
    return {
        "requests": len(records), **outcomes, "span_s": span_s, "good": len(good),
        "goodput_per_s": _ratio(len(good), span_s), "good_share": _ratio(len(good), len(records)),
        "requests_per_s": _ratio(len(finished), span_s),
        "prompt_tokens": prompt, "completion_tokens": output,
        "good_prompt_tokens": sum(record.prompt_tokens for record in good),
        "good_completion_tokens": sum(record.completion_tokens for record in good),
        "prompt_tokens_per_s": _ratio(prompt, span_s), "completion_tokens_per_s": _ratio(output, span_s),
        **_latencies(finished),
        "lag_ms": Spread.of(record.lag_ms for record in records).to_json(),
        "queue_ms": Spread.of(_known(finished, lambda one: one.queue_ms)).to_json(),
        "short": sum(record.is_short for record in finished),
        "drafted_tokens": sum(_known(finished, lambda one: one.num_drafted)),
        "accepted_tokens": sum(_known(finished, lambda one: one.num_accepted)),
        "cached_tokens": cached, "cached_share": None if cached is None else _ratio(cached, prompt),
        "handoff": _handoff(finished), "errors": _errors(records),
        "by_prompt_tokens": _by(records, targets, lambda one: one.prompt_tokens, PROMPT_EDGES),
        "by_completion_tokens": _by(records, targets, lambda one: one.asked_tokens, OUTPUT_EDGES),
        "by_context_tokens": _by(records, targets, lambda one: one.prompt_tokens + one.asked_tokens, PROMPT_EDGES),
    }


def _latencies(finished: Sequence[Record]) -> Document:
    return {
        "ttft_ms": Spread.of(_known(finished, lambda one: one.timing.ttft_ms)).to_json(),
        "itl_ms": Spread.of(itl for record in finished for itl in record.timing.itl_ms).to_json(),
        "request_ms": Spread.of(1e3 * (record.end_s - record.intended_s) for record in finished).to_json(),
    }


def _handoff(finished: Sequence[Record]) -> Document:
    """Bytes moved, how many of them only after the prompt had been computed, and how late that made second tokens."""
    moved = [record for record in finished if record.handoff_bytes is not None]
    return {
        "count": len(moved), "bytes": Spread.of(record.handoff_bytes or 0 for record in moved).to_json(),
        "exposed_bytes": Spread.of(
            (record.handoff_bytes or 0) - (record.hidden_bytes or 0) for record in moved
        ).to_json(),
        "wait_ms": Spread.of(_known(moved, lambda one: one.handoff_wait_ms)).to_json(),
    }


def _errors(records: Sequence[Record]) -> list[Document]:
    """Why requests were refused or failed, the most frequent reasons first."""
    counts = Counter(record.error for record in records if record.error)
    return [{"error": error, "count": count} for error, count in counts.most_common(MOST_ERRORS)]


def _by(records: Sequence[Record], targets: Targets, size: Callable[[Record], int], edges: Sequence[int]
        ) -> list[Document]:
    """Rows of those that have records: up to and with each edge, the last one beyond all."""
    rows = []
    for low, high in zip((0, *edges), (*edges, None), strict=True):
        chosen = [one for one in records if size(one) > low and (high is None or size(one) <= high)]
        if chosen:
            finished = [one for one in chosen if one.outcome is Outcome.FINISHED]
            rows.append({
                "above": low, "up_to": high, "requests": len(chosen),
                "refused": sum(one.outcome is Outcome.REFUSED for one in chosen),
                "good": sum(targets.are_met(one) for one in chosen), **_latencies(finished),
                "queue_ms": Spread.of(_known(finished, lambda one: one.queue_ms)).to_json(),
                "handoff": _handoff(finished),
            })
    return rows


def series(records: Sequence[Record], span_s: float) -> list[Document]:
    """One row a second: what was to be sent, what was answered, tokens, and how many ran at its end."""
    seconds = max(1, math.ceil(span_s))
    rows: list[dict[str, Any]] = [
        {"second": second, "intended": 0, "finished": 0, "refused": 0, "failed": 0, "tokens": 0, "running": 0}
        for second in range(seconds)
    ]

    def row(at_s: float) -> dict[str, Any]:
        return rows[min(seconds - 1, max(0, int(at_s)))]

    for record in records:
        row(record.intended_s)["intended"] += 1
        if record.outcome is not Outcome.UNFINISHED:
            row(record.end_s)[record.outcome.value] += 1
        for at_s, count in record.arrivals:
            row(at_s)["tokens"] += count
        for second in range(max(0, int(record.sent_s)), min(seconds, int(record.end_s))):
            rows[second]["running"] += 1
    return rows


def _known(records: Sequence[Record], value: Callable[[Record], Any]) -> list[Any]:
    return [found for record in records if (found := value(record)) is not None]


def _total(records: Sequence[Record], value: Callable[[Record], Any]) -> int | None:
    """None if no record says."""
    found = _known(records, value)
    return sum(found) if found else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
