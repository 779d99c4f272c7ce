"""A trace as the public API tells it."""

from __future__ import annotations

from pd_engine.contracts import api_pb2 as api
from pd_router.trace import Trace


def trace_message(trace: Trace) -> api.Trace:
    return api.Trace(
        request_id=trace.request_id,
        choice=trace.choice,
        trace_id=trace.trace_id,
        began_at=trace.began_at_s,
        end=trace.end,
        error=trace.error,
        num_prompt_tokens=trace.num_prompt_tokens,
        num_cached_tokens=trace.num_cached_tokens,
        num_tokens=trace.num_tokens,
        ttft_ms=trace.ttft_ms,
        total_ms=trace.total_ms,
        spans=[
            api.TraceSpan(
                name=span.name, depth=span.depth, begun_ms=span.begun_ms, ended_ms=span.ended_ms,
                attributes={name: str(value) for name, value in span.attributes.items()},
            )
            for span in trace.spans
        ],
    )
