"""`pd-relay trace`: where an ended request spent its time."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from pd_engine.contracts import api_pb2
from pd_engine.errors import InvalidArgument, NotFound, shown
from pd_ops.client import find_router, router_client
from pd_ops.commands import options
from pd_ops.output import Document
from pd_ops.tables import table

BAR_CHARS = 40
COLUMNS = ("request", "choice", "end", "prompt", "tokens", "first token", "whole", "trace")
SPAN_COLUMNS = ("span", "from", "took", "", "")


def command(
    context: typer.Context,
    request: Annotated[str | None, typer.Argument(help="The request's id; none: the slowest are listed.")] = None,
    slowest: Annotated[int, typer.Option(min=1, max=100, help="How many of them.")] = 10,
    cluster: options.ClusterName = "default",
    address: options.Address = None,
    grpc_port: options.GrpcPort = None,
    as_json: options.Json = False,
) -> None:
    """Show where an ended request spent its time: queue, prefill by chunk, transfer, steps. Or list the slowest."""
    output = options.start(context, as_json)
    if request == "":
        raise InvalidArgument("a request's id has at least one character")
    wanted = api_pb2.GetTracesRequest(request_id=request or "", num_slowest=slowest)
    traces = asyncio.run(_traces(find_router(address=address, grpc_port=grpc_port, cluster=cluster), wanted))
    if request is not None and not traces:
        raise NotFound(
            f"no ended request {shown(request)} is kept: it may still run; kept are the last ones and the slowest "
            "(router.kept_traces)"
        )
    documents = [trace_document(trace) for trace in traces]
    output.document({"traces": documents})
    output.text("\n\n".join(map(waterfall, documents)) if request is not None else list_text(documents))


async def _traces(router: str, wanted: api_pb2.GetTracesRequest) -> list[api_pb2.Trace]:
    async with router_client(router) as client:
        return await client.traces(wanted)


def trace_document(trace: api_pb2.Trace) -> Document:
    """The documented keys."""
    return {
        "request_id": trace.request_id, "choice": trace.choice, "trace_id": trace.trace_id,
        "began_at": trace.began_at, "end": trace.end, "error": trace.error or None,
        "num_prompt_tokens": trace.num_prompt_tokens, "num_cached_tokens": trace.num_cached_tokens,
        "num_tokens": trace.num_tokens, "ttft_ms": trace.ttft_ms if trace.HasField("ttft_ms") else None,
        "total_ms": trace.total_ms,
        "spans": [
            {
                "name": span.name, "depth": span.depth, "begun_ms": span.begun_ms, "ended_ms": span.ended_ms,
                "attributes": dict(sorted(span.attributes.items())),
            }
            for span in trace.spans
        ],
    }


def list_text(documents: list[Document]) -> str:
    """The slowest first."""
    if not documents:
        return "no ended request is kept"
    rows = [
        [
            document["request_id"], document["choice"], document["error"] or document["end"],
            f"{document['num_prompt_tokens']} ({document['num_cached_tokens']} cached)", document["num_tokens"],
            "-" if document["ttft_ms"] is None else f"{document['ttft_ms']:.0f} ms", f"{document['total_ms']:.0f} ms",
            document["trace_id"],
        ]
        for document in documents
    ]
    return table(COLUMNS, rows)


def waterfall(document: Document) -> str:
    """One line a span, with its place in the request's time as a bar."""
    total_ms = document["total_ms"]
    ttft = "no token" if document["ttft_ms"] is None else f"first token after {document['ttft_ms']:.1f} ms"
    head = (
        f"request {document['request_id']}, choice {document['choice']}: {document['error'] or document['end']}, "
        f"{document['num_prompt_tokens']} prompt tokens ({document['num_cached_tokens']} cached), "
        f"{document['num_tokens']} tokens, {ttft}, {total_ms:.1f} ms in all; trace {document['trace_id']}"
    )
    rows = [
        [
            "  " * span["depth"] + span["name"], f"{span['begun_ms']:.1f}",
            f"{span['ended_ms'] - span['begun_ms']:.1f} ms", bar(span["begun_ms"], span["ended_ms"], total_ms),
            ", ".join(f"{name} {value}" for name, value in span["attributes"].items()),
        ]
        for span in document["spans"]
    ]
    return f"{head}\n{table(SPAN_COLUMNS, rows)}"


def bar(begun_ms: float, ended_ms: float, total_ms: float) -> str:
    """Of a whole that is `BAR_CHARS` wide; however short, a span has one character."""
    if total_ms <= 0:
        return ""
    first = min(int(begun_ms / total_ms * BAR_CHARS), BAR_CHARS - 1)
    last = max(first + 1, round(ended_ms / total_ms * BAR_CHARS))
    return " " * first + "=" * (last - first)
