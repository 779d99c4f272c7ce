"""`pd-relay memory`: what each worker's memory is taken by."""

from __future__ import annotations

import asyncio

import typer

from pd_engine.contracts import api_pb2
from pd_ops.client import find_router, server_info
from pd_ops.commands import options
from pd_ops.output import Document
from pd_ops.tables import mib, table

PARTS = {
    "resident": "resident", "peak_resident": "at most", "weights": "weights", "arena": "arena",
    "arena_resident": "touched", "host_cache": "waiting", "code": "code", "other": "other",
    "allocator_reserved": "malloc has", "allocator_used": "uses", "available": "left",
}


def command(
    context: typer.Context,
    cluster: options.ClusterName = "default",
    address: options.Address = None,
    grpc_port: options.GrpcPort = None,
    as_json: options.Json = False,
) -> None:
    """Show what each worker's memory is taken by, and what is left on its host."""
    output = options.start(context, as_json)
    info = asyncio.run(server_info(find_router(address=address, grpc_port=grpc_port, cluster=cluster)))
    document = memory_document(info)
    output.document(document)
    output.text(memory_text(document))


def memory_document(info: api_pb2.GetServerInfoResponse) -> Document:
    """The documented keys."""
    return {
        "router_rss_bytes": info.router_rss_bytes,
        "workers": [
            {
                "id": worker.id, "role": worker.role, "host": worker.host, "state": worker.state,
                "memory": {f"{part}_bytes": getattr(worker.memory, f"{part}_bytes") for part in PARTS}
                if worker.HasField("memory") else None,
            }
            for worker in info.workers
        ],
    }


def memory_text(document: Document) -> str:
    """For people."""
    rows = [
        [worker["id"], worker["host"]]
        + (
            ["-"] * len(PARTS) if worker["memory"] is None
            else [mib(worker["memory"][f"{part}_bytes"]) for part in PARTS]
        )
        for worker in document["workers"]
    ]
    return (
        f"{table(('id', 'host', *PARTS.values()), rows)}\n"
        f"router: {mib(document['router_rss_bytes'])} resident\n"
        "resident = weights + touched (of the arena) + waiting (sequences in host memory) + code + other (activations, "
        "staging, interpreter, free in malloc)"
    )
