"""The trace of one choice: its timeline as spans, for people and for OpenTelemetry. Pure.

    request                          with what the router spent on it: tokenize_ms before it, streaming_ms in it
      queue                          in the router's line
      attempt                        one placement
        reserve                      the decode worker is asked for a lease
        prefill                      until the first token; at the worker:
          prefill.queue, prefill.fetch, prefill.chunk ...
        handoff                      the decode worker pulls
          handoff.hidden             while the prompt is still being computed
          handoff.exposed            after that
        decode.wait                  from the handoff to the first token of a step
      steps                          from the first token to the last one

What a worker tells is durations from an event that the router knows, too; it is placed before that event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from statistics import median

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.service.prompt_times import MAX_CHUNKS
from pd_router.timeline import AttemptTimes, Timeline

Value = str | int | float
NO_ATTRIBUTES: Mapping[str, Value] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """`depth`: 0 for the request; a span's parent is the last one before it that is less deep. Milliseconds from the
    request's beginning."""

    name: str
    depth: int
    begun_ms: float
    ended_ms: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Attributes:
    trace_id, parent_id: 32 and 16 hexadecimal digits; the parent is the client's span, or empty.
    began_at_s: by the wall clock.
    end: the terminal state.
    error: its code, or empty.
    """

    request_id: str
    choice: int
    trace_id: str
    parent_id: str
    began_at_s: float
    end: str
    error: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    ttft_ms: float | None
    total_ms: float
    spans: tuple[Span, ...]


def spans_of(timeline: Timeline, about: Mapping[str, Value] = NO_ATTRIBUTES) -> tuple[Span, ...]:
    """Of a choice that has ended, parents before their children.

    Args:
        about: attributes of the first one.
    """
    assert timeline.ended_s is not None, "it goes on"
    return tuple(_spans(timeline, timeline.ended_s, about))


def _spans(timeline: Timeline, ended_s: float, about_all: Mapping[str, Value]) -> Iterator[Span]:
    at = _Scale(timeline.begun_s, ended_s)
    yield at.span("request", 0, timeline.begun_s, ended_s, about_all)
    begun_s = timeline.begun_s
    attempts = timeline.attempts
    for attempt, following in zip_longest(attempts, attempts[1:]):
        yield at.span("queue", 1, begun_s, attempt.placed_s)
        begun_s = _end_of(attempt, timeline, ended_s if following is None else following.placed_s)
        yield at.span("attempt", 1, attempt.placed_s, begun_s, _about(attempt))
        yield from _of_attempt(at, attempt, timeline, begun_s)
    if not attempts:
        yield at.span("queue", 1, begun_s, ended_s)
    arrivals_s = timeline.arrivals_s
    if len(arrivals_s) > 1:
        gaps_ms = [(after - before) * 1000 for before, after in pairwise(arrivals_s)]
        longest = max(range(len(gaps_ms)), key=gaps_ms.__getitem__)
        about: dict[str, Value] = {
            "steps": len(gaps_ms), "median_ms": round(median(gaps_ms), 3), "longest_ms": round(gaps_ms[longest], 3),
            "longest_at_step": longest + 1,
        }
        yield at.span("steps", 1, arrivals_s[0], arrivals_s[-1], about)


def _of_attempt(at: _Scale, attempt: AttemptTimes, timeline: Timeline, ended_s: float) -> Iterator[Span]:
    begun_s = attempt.placed_s
    if attempt.reserved_s is not None:
        yield at.span("reserve", 2, attempt.placed_s, attempt.reserved_s)
        begun_s = attempt.reserved_s
    if attempt.prefilled_s is not None:
        yield at.span("prefill", 2, begun_s, attempt.prefilled_s)
        if attempt.prompt is not None:
            yield from _of_prompt(at, attempt.prompt, begun_s, attempt.prefilled_s)
    if attempt.handed_over_s is not None and attempt.handoff is not None:
        yield from _of_handoff(at, attempt, attempt.handoff, attempt.handed_over_s)
        later = [arrived_s for arrived_s in timeline.arrivals_s if arrived_s > attempt.handed_over_s]
        if later and later[0] <= ended_s:
            yield at.span("decode.wait", 2, attempt.handed_over_s, later[0])


def _of_prompt(at: _Scale, times: pb.PromptTimes, earliest_s: float, ended_s: float) -> Iterator[Span]:
    came_s = max(earliest_s, ended_s - times.total_ms / 1000)
    if times.queue_ms:
        yield at.span("prefill.queue", 3, came_s, came_s + times.queue_ms / 1000)
    if times.fetch_ms:
        fetching_s = came_s + times.queue_ms / 1000
        yield at.span("prefill.fetch", 3, fetching_s, fetching_s + times.fetch_ms / 1000)
    for chunk in times.chunks[:MAX_CHUNKS]:
        begun_s = came_s + chunk.begun_ms / 1000
        yield at.span("prefill.chunk", 3, begun_s, begun_s + chunk.ms / 1000, {"tokens": chunk.num_tokens})


def _of_handoff(at: _Scale, attempt: AttemptTimes, done: pb.HandoffDone, ended_s: float) -> Iterator[Span]:
    begun_s = max(attempt.placed_s, ended_s - done.pull_ms / 1000)
    exposed_s = max(begun_s, ended_s - done.exposed_ms / 1000)
    about: dict[str, Value] = {
        "transport": done.transport, "bytes": done.bytes, "hidden_bytes": done.hidden_bytes,
    }
    yield at.span("handoff", 2, begun_s, ended_s, about)
    yield at.span("handoff.hidden", 3, begun_s, exposed_s)
    yield at.span("handoff.exposed", 3, exposed_s, ended_s)


def _about(attempt: AttemptTimes) -> dict[str, Value]:
    about: dict[str, Value] = {
        "number": attempt.number, "kind": attempt.kind, "reason": attempt.reason,
        "prefill_worker": attempt.prefill_worker, "decode_worker": attempt.decode_worker,
    }
    return about | ({"failure": attempt.failure} if attempt.failure else {})


def _end_of(attempt: AttemptTimes, timeline: Timeline, at_most_s: float) -> float:
    """A failed attempt ends when it is known to have failed, at the last when the next one is placed."""
    return at_most_s if attempt.failed_s is None else min(attempt.failed_s, at_most_s)


class _Scale:
    """Seconds of the router's clock to milliseconds of the request, within it: what workers tell is not trusted."""

    def __init__(self, begun_s: float, ended_s: float) -> None:
        self._begun_s = begun_s
        self._total_ms = (ended_s - begun_s) * 1000

    def span(
        self, name: str, depth: int, begun_s: float, ended_s: float, attributes: Mapping[str, Value] = NO_ATTRIBUTES
    ) -> Span:
        begun_ms = self._within(begun_s, 0.0)
        return Span(
            name=name, depth=depth, begun_ms=begun_ms, ended_ms=self._within(ended_s, begun_ms), attributes=attributes
        )

    def _within(self, at_s: float, at_least_ms: float) -> float:
        at_ms = (at_s - self._begun_s) * 1000
        return min(max(at_ms, at_least_ms), self._total_ms) if at_ms == at_ms else at_least_ms
