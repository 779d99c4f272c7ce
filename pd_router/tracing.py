"""Makes a trace of each choice that has ended, keeps some, and gives them to the exporter."""

from __future__ import annotations

import time

from pd_router.known_requests import RequestKey
from pd_router.running import RunningChoice, RunningRequest
from pd_router.trace import Trace, spans_of
from pd_router.trace_book import TraceBook
from pd_router.trace_export import TraceExporter


class Tracing:
    """Attributes:
    book: what is kept.

    Args:
        num_kept: traces; 0: none.
        exporter: None: nothing is exported.
    """

    def __init__(self, num_kept: int, exporter: TraceExporter | None = None) -> None:
        self.book = TraceBook(num_kept)
        self._num_kept = num_kept
        self._exporter = exporter

    def note_end(self, running: RunningRequest, choice: RunningChoice, key: RequestKey) -> None:
        """The choice has ended."""
        parent = running.trace_parent
        is_wanted = self._exporter is not None and (parent is None or parent.is_sampled)
        if not self._num_kept and not is_wanted:
            return
        trace = _trace(running, choice)
        if self._num_kept:
            assert choice.timeline is not None and choice.timeline.ended_s is not None, "it goes on"
            self.book.add(key.caller, trace, choice.timeline.ended_s)
        if is_wanted and self._exporter is not None:
            self._exporter.offer(trace)


def _trace(running: RunningRequest, choice: RunningChoice) -> Trace:
    """All choices of a request are one trace: the client's, or one of the first journey's name."""
    request, journey, timeline, parent = choice.request, choice.journey, choice.timeline, running.trace_parent
    assert timeline is not None and timeline.ended_s is not None, "it goes on"
    total_s = timeline.ended_s - timeline.begun_s
    first_s = timeline.first_token_s
    return Trace(
        request_id=request.request_id,
        choice=request.choice,
        trace_id=running.choices[0].journey.journey_id if parent is None else parent.trace_id,
        parent_id="" if parent is None else parent.span_id,
        began_at_s=time.time() - total_s,
        end=journey.state.value,
        error="" if journey.error is None else journey.error.code.value,
        num_prompt_tokens=len(request.prompt_ids),
        num_cached_tokens=journey.num_cached_tokens or 0,
        num_tokens=len(journey.stream.tokens),
        ttft_ms=None if first_s is None else first_s * 1000,
        total_ms=total_s * 1000,
        spans=spans_of(timeline, {
            "tokenize_ms": round(running.submission.tokenize_s * 1000, 3),
            "streaming_ms": round(choice.streaming.seconds * 1000, 3),
        }),
    )
