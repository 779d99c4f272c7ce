"""Traces: timelines as spans, what is kept and for whom, the client's trace id, and what a collector is sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.service.prompt_times import MAX_CHUNKS, PromptTimes
from pd_router.timeline import AttemptTimes, Timeline
from pd_router.trace import Span, Trace, spans_of
from pd_router.trace_book import SLOW_LIFE_S, TraceBook
from pd_router.trace_export import TraceExporter, otlp
from pd_router.trace_parent import TraceParent
from support.router_lab import eventually, router_lab, settings

CLIENT_TRACE, CLIENT_SPAN = "ab" * 16, "cd" * 8


def attempt(number: int, placed_s: float, **fields: Any) -> AttemptTimes:
    return AttemptTimes(
        number=number, kind="remote", reason="idlest", prefill_worker="p0", decode_worker="d0", placed_s=placed_s,
        num_tokens_before=0, **fields,
    )


def handed_over() -> Timeline:
    """Begun at 100 s; everything that a handed over request does."""
    timeline = Timeline(begun_s=100.0, ended_s=102.0)
    prompt = pb.PromptTimes(total_ms=400, queue_ms=100, fetch_ms=50, chunks=[
        pb.ChunkTime(begun_ms=150, ms=100, num_tokens=256), pb.ChunkTime(begun_ms=260, ms=130, num_tokens=44),
    ])
    handoff = pb.HandoffDone(bytes=1000, hidden_bytes=800, transport="tcp", pull_ms=300, exposed_ms=50)
    timeline.attempts.append(
        attempt(
            1, 100.25, reserved_s=100.3, source_s=100.35, prefilled_s=100.75, handed_over_s=101.0, prompt=prompt,
            handoff=handoff,
        )
    )
    for at_s in (100.75, 101.25, 101.5, 102.0):
        timeline.note_tokens(at_s)
    return timeline


def test_a_waterfall_of_a_handed_over_request() -> None:
    spans = spans_of(handed_over())
    found = [(span.name, span.depth, round(span.begun_ms), round(span.ended_ms)) for span in spans]
    assert found == [
        ("request", 0, 0, 2000),
        ("queue", 1, 0, 250),
        ("attempt", 1, 250, 2000),
        ("reserve", 2, 250, 300),
        ("prefill", 2, 300, 750),
        ("prefill.queue", 3, 350, 450),
        ("prefill.fetch", 3, 450, 500),
        ("prefill.chunk", 3, 500, 600),
        ("prefill.chunk", 3, 610, 740),
        ("handoff", 2, 700, 1000),
        ("handoff.hidden", 3, 700, 950),
        ("handoff.exposed", 3, 950, 1000),
        ("decode.wait", 2, 1000, 1250),
        ("steps", 1, 750, 2000),
    ]
    assert [span.attributes["tokens"] for span in spans if span.name == "prefill.chunk"] == [256, 44]
    assert spans[-1].attributes == {"steps": 3, "median_ms": 500.0, "longest_ms": 500.0, "longest_at_step": 1}


def test_attempts_that_failed_and_a_request_that_was_never_placed() -> None:
    timeline = Timeline(begun_s=0.0, ended_s=3.0)
    timeline.attempts += [
        attempt(1, 0.5, failure="unavailable at p0", failed_s=1.0),
        attempt(2, 1.5, failure="data_loss at d0", failed_s=2.0),
    ]
    found = [(span.name, span.begun_ms, span.ended_ms) for span in spans_of(timeline)]
    assert found == [
        ("request", 0, 3000), ("queue", 0, 500), ("attempt", 500, 1000), ("queue", 1000, 1500), ("attempt", 1500, 2000),
    ]
    never = spans_of(Timeline(begun_s=0.0, ended_s=1.0))
    assert [(span.name, span.ended_ms) for span in never] == [("request", 1000), ("queue", 1000)]


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(times=st.lists(NUMBERS, min_size=5, max_size=5), chunks=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5))
def test_whatever_workers_tell_spans_stay_within_the_request(
    times: list[float], chunks: list[tuple[float, float]]
) -> None:
    timeline = handed_over()
    first = timeline.attempts[0]
    first.prompt = pb.PromptTimes(
        total_ms=times[0], queue_ms=times[1], fetch_ms=times[2],
        chunks=[pb.ChunkTime(begun_ms=begun, ms=ms, num_tokens=1) for begun, ms in chunks],
    )
    first.handoff = pb.HandoffDone(pull_ms=times[3], exposed_ms=times[4])
    for span in spans_of(timeline):
        assert 0 <= span.begun_ms <= span.ended_ms <= 2000, span


def test_chunks_beyond_the_bound_are_one() -> None:
    times = PromptTimes(arrived_s=0.0, running_s=1.0)
    for number in range(MAX_CHUNKS + 10):
        times.note_chunk(number + 2.0, 1.0, 3)
    message = times.message(1000.0)
    assert len(message.chunks) == MAX_CHUNKS
    assert sum(chunk.num_tokens for chunk in message.chunks) == 3 * (MAX_CHUNKS + 10)
    assert message.chunks[-1].begun_ms == MAX_CHUNKS * 1000
    assert message.chunks[-1].ms == 11_000
    assert (message.queue_ms, message.fetch_ms, message.total_ms) == (1000, 0, 1_000_000)


def trace(request_id: str, total_ms: float, choice: int = 0) -> Trace:
    return Trace(
        request_id=request_id, choice=choice, trace_id="1" * 32, parent_id="", began_at_s=1.0, end="stopped", error="",
        num_prompt_tokens=3, num_cached_tokens=0, num_tokens=2, ttft_ms=1.0, total_ms=total_ms,
        spans=(Span(name="request", depth=0, begun_ms=0.0, ended_ms=total_ms),),
    )


def test_the_book_keeps_the_last_and_the_slowest_of_each_caller() -> None:
    book = TraceBook(8)
    book.add("a", trace("slow", 9000), 0.0)
    for number in range(50):
        book.add("a", trace(f"r{number}", number), 1.0)
    book.add("b", trace("other", 20_000), 1.0)
    assert [one.request_id for one in book.slowest("a", 3)] == ["slow", "r49", "r48"]
    assert [one.request_id for one in book.slowest("b", 3)] == ["other"]
    assert book.of_request("a", "other") == []
    assert book.of_request("a", "r1") == []
    assert len(book.of_request("a", "slow")) == 1
    book.add("a", trace("r49", 1, choice=1), 2.0)
    assert [one.choice for one in book.of_request("a", "r49")] == [0, 1]
    book.add("a", trace("new", 1), SLOW_LIFE_S + 1.5)
    assert book.of_request("a", "slow") == [], "it was slow long ago"
    TraceBook(0).add("a", trace("x", 1), 0.0)


@pytest.mark.parametrize("header", [
    None, "", "nonsense", f"00-{CLIENT_TRACE}", f"00-{'0' * 32}-{CLIENT_SPAN}-01", f"00-{CLIENT_TRACE}-{'0' * 16}-01",
    f"ff-{CLIENT_TRACE}-{CLIENT_SPAN}-01", f"00-{CLIENT_TRACE.upper()}-{CLIENT_SPAN}-01",
])
def test_no_parent(header: str | None) -> None:
    assert TraceParent.parse(header) is None


def test_a_parent() -> None:
    assert TraceParent.parse(f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01") == TraceParent(CLIENT_TRACE, CLIENT_SPAN, True)
    assert TraceParent.parse(f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00") == TraceParent(CLIENT_TRACE, CLIENT_SPAN, False)


async def test_a_router_tells_where_requests_spent_their_time() -> None:
    async with router_lab() as lab:
        async for _ in lab.stream(lab.request(request_id="by-grpc", n=2)):
            pass
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "request_id": "by-http"}
        headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
        assert (await lab.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await eventually(lambda: lab.router.num_running == 0)
        two = (await lab.api.GetTraces(api.GetTracesRequest(request_id="by-grpc"))).traces
        assert [one.choice for one in two] == [0, 1]
        assert len({one.trace_id for one in two}) == 1, "one trace a request"
        names = [span.name for span in two[0].spans]
        assert names == ["request", "queue", "attempt", "reserve", "prefill", "handoff", "handoff.hidden",
                         "handoff.exposed", "decode.wait", "steps"]
        assert two[0].spans[2].attributes["prefill_worker"] == "prefill-0"
        assert two[0].ttft_ms <= two[0].total_ms
        assert float(two[0].spans[0].attributes["streaming_ms"]) > 0
        assert two[0].spans[0].attributes["tokenize_ms"] == "0.0", "its prompt came as token ids"
        [one] = (await lab.api.GetTraces(api.GetTracesRequest(request_id="by-http"))).traces
        assert one.trace_id == CLIENT_TRACE
        slowest = (await lab.api.GetTraces(api.GetTracesRequest(num_slowest=2))).traces
        assert len(slowest) == 2
        assert slowest[0].total_ms >= slowest[1].total_ms
        assert not (await lab.api.GetTraces(api.GetTracesRequest(request_id="unknown"))).traces


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL, and what it was sent."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_a_collector_gets_one_trace_a_request_under_the_clients() -> None:
    with collector() as (url, received):
        async with router_lab(settings(router={"trace_endpoint": url})) as lab:
            metadata = grpc.aio.Metadata(("traceparent", f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"))
            async for _ in lab.api.Generate(lab.request(request_id="r"), metadata=metadata):
                pass
            not_sampled = grpc.aio.Metadata(("traceparent", f"00-{'ef' * 16}-{CLIENT_SPAN}-00"))
            async for _ in lab.api.Generate(lab.request(), metadata=not_sampled):
                pass
            await eventually(lambda: bool(received))
        spans = [
            span for message in received for resource in message["resourceSpans"]
            for scope in resource["scopeSpans"] for span in scope["spans"]
        ]
        assert {span["traceId"] for span in spans} == {CLIENT_TRACE}, "what the client does not keep is not sent"
        ids = {span["spanId"]: span for span in spans}
        assert len(ids) == len(spans)
        [root] = [span for span in spans if span["name"] == "request"]
        assert root["parentSpanId"] == CLIENT_SPAN
        assert {"key": "gen_ai.request.id", "value": {"stringValue": "r"}} in root["attributes"]
        parents = {span["name"]: ids[span["parentSpanId"]]["name"] for span in spans if span is not root}
        assert parents["queue"] == parents["attempt"] == parents["steps"] == "request"
        assert parents["prefill"] == parents["handoff"] == "attempt"
        assert parents["handoff.exposed"] == "handoff"
        for span in spans:
            assert int(root["startTimeUnixNano"]) <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])


async def test_a_collector_that_refuses_costs_traces_and_nothing_else() -> None:
    with collector(status=503) as (url, received):
        exporter = TraceExporter(url, "demo")
        for _ in range(3):
            exporter.offer(trace("r", 1.0))
        await eventually(lambda: exporter.num_dropped == 3)
        assert received
        await exporter.close()
    exporter = TraceExporter(url, "demo")  # nobody listens there any more
    exporter.offer(trace("r", 1.0))
    await eventually(lambda: exporter.num_dropped == 1)
    await exporter.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "trace export"]


def test_errors_have_a_status() -> None:
    failed = replace(trace("r", 1.0), error="unavailable", end="failed")
    [span] = otlp([failed], "demo")["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert span["status"] == {"code": 2, "message": "unavailable"}
    assert "parentSpanId" not in span
