"""Traces to an OpenTelemetry collector: OTLP over HTTP in its JSON form, in the background, as well as it goes.

What the collector does not take in time is dropped and counted: a trace is never worth a token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from typing import Any

from pd_router.trace import Span, Trace, Value

MAX_WAITING = 2_048
BATCH = 128
PAUSE_S = 1.0
TIMEOUT_S = 10.0
_SERVER_KIND, _INTERNAL_KIND, _ERROR = 2, 1, 2

log = logging.getLogger(__name__)


class TraceExporter:
    """Args:
    endpoint: of the collector, such as http://127.0.0.1:4318/v1/traces.
    model: the served name, told with each.

    Attributes:
        num_dropped: traces that never arrived.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        self._endpoint = endpoint
        self._model = model
        self._waiting: deque[Trace] = deque()
        self._task: asyncio.Task[None] | None = None
        self._was_ok = True
        self.num_dropped = 0

    def offer(self, trace: Trace) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        self._waiting.append(trace)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all(), name="trace export")

    async def close(self) -> None:
        """Gives what waits one last chance, for a bounded time."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=PAUSE_S * 2)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send_all(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            body = json.dumps(otlp(batch, self._model)).encode()
            try:
                await asyncio.to_thread(_post, self._endpoint, body)
            except OSError as error:
                self.num_dropped += len(batch)
                if self._was_ok:  # once for each time that it goes away
                    log.warning("traces cannot be sent to %s: %s", self._endpoint, error)
                self._was_ok = False
                await asyncio.sleep(PAUSE_S)
            else:
                self._was_ok = True


def _post(endpoint: str, body: bytes) -> None:
    """Raises:
    OSError: it was not taken.
    """
    request = urllib.request.Request(
        endpoint, data=body, headers={"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        response.read()


def otlp(traces: Sequence[Trace], model: str) -> dict[str, Any]:
    """An ExportTraceServiceRequest."""
    resource = {"attributes": _attributes({"service.name": "pd-relay", "gen_ai.request.model": model})}
    spans = [span for trace in traces for span in _otlp_spans(trace)]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "pd_router"}, "spans": spans}]}]}


def _otlp_spans(trace: Trace) -> list[dict[str, Any]]:
    parents = [trace.parent_id]  # by depth
    spans = []
    for number, span in enumerate(trace.spans):
        span_id = _span_id(trace, number)
        del parents[span.depth + 1 :]
        spans.append(_otlp_span(trace, span, span_id=span_id, parent_id=parents[-1]))
        parents.append(span_id)
    return spans


def _otlp_span(trace: Trace, span: Span, *, span_id: str, parent_id: str) -> dict[str, Any]:
    is_root = span.depth == 0
    about: dict[str, Value] = dict(span.attributes)
    if is_root:
        about |= {
            "gen_ai.request.id": trace.request_id, "pdrelay.choice": trace.choice, "pdrelay.end": trace.end,
            "gen_ai.usage.input_tokens": trace.num_prompt_tokens, "gen_ai.usage.output_tokens": trace.num_tokens,
            "pdrelay.cached_tokens": trace.num_cached_tokens,
        }
    found = {
        "traceId": trace.trace_id, "spanId": span_id, "name": span.name,
        "kind": _SERVER_KIND if is_root else _INTERNAL_KIND,
        "startTimeUnixNano": str(round((trace.began_at_s + span.begun_ms / 1000) * 1e9)),
        "endTimeUnixNano": str(round((trace.began_at_s + span.ended_ms / 1000) * 1e9)),
        "attributes": _attributes(about),
    }
    if parent_id:
        found["parentSpanId"] = parent_id
    if is_root and trace.error:
        found["status"] = {"code": _ERROR, "message": trace.error}
    return found


def _span_id(trace: Trace, number: int) -> str:
    name = f"{trace.trace_id}/{trace.began_at_s}/{trace.choice}/{number}"
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _attributes(values: dict[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}
