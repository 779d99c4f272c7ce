"""What is known of one request after it was sent: the raw record, one line of JSON."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from pd_engine.errors import InvalidArgument
from pd_ops.latency import StreamTiming

MAX_RECORDS_BYTES = 4 * 2**30
FEWEST_GAPS = 3
NUMBERS = (
    "number", "intended_s", "sent_s", "end_s", "prompt_tokens", "asked_tokens", "num_cached_tokens", "num_told_tokens",
    "num_drafted", "num_accepted", "handoff_bytes", "hidden_bytes", "queue_ms",
)


class Outcome(Enum):
    FINISHED = "finished"
    REFUSED = "refused"        # told that there is no room: HTTP 429, RESOURCE_EXHAUSTED
    FAILED = "failed"
    UNFINISHED = "unfinished"  # still running when the measurement was ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Seconds count from the beginning of the measurement.

    Attributes:
        intended_s: when it should have been sent, from which its latencies count; of a closed loop when it was sent.
        arrivals: (when, tokens that came then).
        num_cached_tokens, num_told_tokens (of the answer), num_drafted, num_accepted: None: the endpoint did not say.
        handoff_bytes, hidden_bytes, queue_ms: of a pd-relay over gRPC; queue_ms is what the router expected.
    """

    number: int
    kind: str
    intended_s: float
    sent_s: float
    end_s: float
    outcome: Outcome
    prompt_tokens: int
    asked_tokens: int
    arrivals: tuple[tuple[float, int], ...] = ()
    num_cached_tokens: int | None = None
    num_told_tokens: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None
    handoff_bytes: int | None = None
    hidden_bytes: int | None = None
    queue_ms: float | None = None
    finish_reason: str = ""
    error: str = ""

    @property
    def completion_tokens(self) -> int:
        """As the endpoint counts them; else as they were seen to come."""
        return sum(count for _, count in self.arrivals) if self.num_told_tokens is None else self.num_told_tokens

    @property
    def is_short(self) -> bool:
        """It is known to have ended before the length that was asked for."""
        return self.num_told_tokens is not None and self.num_told_tokens < self.asked_tokens

    @property
    def timing(self) -> StreamTiming:
        return StreamTiming(start=self.intended_s, arrivals=self.arrivals)

    @property
    def handoff_wait_ms(self) -> float | None:
        """What the second token waited beyond a usual gap, in which a handoff shows; None: there was no handoff, or
        there are too few gaps to tell what is usual."""
        gaps = [1e3 * (after[0] - before[0]) for before, after in itertools.pairwise(self.arrivals)]
        if self.handoff_bytes is None or len(gaps) < FEWEST_GAPS:
            return None
        return max(0.0, gaps[0] - statistics.median(gaps[1:]))

    @property
    def lag_ms(self) -> float:
        """By how much the generator was late."""
        return 1e3 * (self.sent_s - self.intended_s)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": self.outcome.value, "arrivals": [list(one) for one in self.arrivals]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Raises ValueError, TypeError, KeyError or OverflowError."""
        arrivals = tuple((float(at), int(count)) for at, count in data["arrivals"])
        _check([at for at, _ in arrivals], {name: data[name] for name in NUMBERS if data.get(name) is not None})
        return cls(**{**data, "outcome": Outcome(data["outcome"]), "arrivals": arrivals})


def _check(times: Sequence[float], numbers: dict[str, Any]) -> None:
    """Raises ValueError: a number is none, is infinite or below 0, or times are not in order."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {str(value)[:40]}")
    if not all(map(math.isfinite, times)) or any(after < before for before, after in itertools.pairwise(times)):
        raise ValueError("tokens arrive at no time, or before others that came earlier")


@dataclass(kw_only=True)
class Recording:
    """A record that is being written: its sender fills it as things come, so that an interruption loses nothing."""

    number: int
    kind: str
    intended_s: float
    prompt_tokens: int
    asked_tokens: int
    sent_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def close(self, outcome: Outcome, end_s: float, error: str = "") -> Record:
        return Record(
            number=self.number, kind=self.kind, intended_s=self.intended_s, sent_s=self.sent_s, end_s=end_s,
            outcome=outcome, prompt_tokens=self.prompt_tokens, asked_tokens=self.asked_tokens,
            arrivals=tuple(self.arrivals), error=error, **self.details,
        )


def write_records(path: Path, records: Iterable[Record]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False) + "\n")


def read_records(path: Path) -> list[Record]:
    """Raises:
    InvalidArgument: the file cannot be read, or a line is no record.
    """
    records: list[Record] = []
    try:
        if path.stat().st_size > MAX_RECORDS_BYTES:
            raise InvalidArgument(f"{path} is larger than {MAX_RECORDS_BYTES} bytes")
        with path.open(encoding="utf-8") as file:
            records.extend(Record.from_json(json.loads(line)) for line in file)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidArgument(
            f"{path}, line {len(records) + 1}, is no record of a request: {type(error).__name__}: {error}"
        ) from None
    return records
