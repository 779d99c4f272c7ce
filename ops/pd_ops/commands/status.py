"""`pd-relay status`: the pools of a running cluster, and the memory that it takes on this host."""

from __future__ import annotations

import asyncio

import typer

from pd_engine.contracts import api_pb2
from pd_engine.errors import Unavailable
from pd_ops.client import find_router, ready_state, server_info
from pd_ops.cluster.control_client import ask_controller
from pd_ops.cluster.control_messages import StatusRequest
from pd_ops.cluster.processes import resident_bytes_below
from pd_ops.commands import options
from pd_ops.output import Document, Output
from pd_ops.tables import mib, table

COLUMNS = (
    "id", "role", "pid", "host", "address", "epoch", "state", "free/blocks", "running", "waiting",
    "preempted", "rss", "weights", "arena", "ops", "load",
)

PROCESS_COLUMNS = ("process", "state", "pid", "address", "restarts", "ended before")

EPOCH_CHARS = 8  # shown to people


def command(
    context: typer.Context,
    cluster: options.ClusterName = "default",
    address: options.Address = None,
    grpc_port: options.GrpcPort = None,
    as_json: options.Json = False,
) -> None:
    """Show the router and the workers of a running cluster."""
    output = options.start(context, as_json)
    is_named = address is None and grpc_port is None
    serving_pid = ready_state(cluster).pid if is_named else None
    processes = _processes(cluster, output) if is_named else None
    try:
        info = asyncio.run(server_info(find_router(address=address, grpc_port=grpc_port, cluster=cluster)))
    except Unavailable:
        if processes is not None:
            output.text(processes_text(processes))
        raise
    document = {**status_document(info, serving_pid), "processes": processes}
    output.document(document)
    output.text("\n".join([status_text(document), *processes_lines(processes or {})]))


def _processes(cluster: str, output: Output) -> Document | None:
    """As the controller has them; None if it does not say so."""
    try:
        return asyncio.run(ask_controller(cluster, StatusRequest()))
    except Unavailable as error:
        output.note(f"without processes: {error.message}")
        return None


def processes_text(processes: Document) -> str:
    """All that the controller has to tell, where the router tells nothing."""
    rows = [
        [member["id"], member["state"], member["pid"] or "-", member["address"] or "-", member["restarts"],
         member["last_end"] or ""]
        for member in [processes["router"], *processes["workers"]]
    ]
    return "\n".join([table(PROCESS_COLUMNS, rows), *_other_lines(processes)])


def status_document(info: api_pb2.GetServerInfoResponse, serving_pid: int | None) -> Document:
    """The documented keys.

    Args:
        serving_pid: of `pd-relay serve` on this host, if this is its cluster: its memory and Ray's are counted then.
    """
    workers: list[Document] = [_worker_document(worker) for worker in info.workers]
    memory: Document = {
        "router_rss_bytes": info.router_rss_bytes,
        "workers_rss_bytes": sum(worker.rss_bytes for worker in info.workers),
        "ray_rss_bytes": None,
        "total_rss_bytes": None,
    }
    if serving_pid is not None:
        counted = {info.router_pid, *(worker.pid for worker in info.workers)}
        memory["ray_rss_bytes"] = resident_bytes_below(serving_pid, apart_from=counted)
        memory["total_rss_bytes"] = (
            memory["ray_rss_bytes"] + memory["router_rss_bytes"] + memory["workers_rss_bytes"]
        )
    return {
        "cluster": info.cluster, "version": info.version, "uptime_seconds": info.uptime_seconds,
        "active_requests": info.active_requests, "router_pid": info.router_pid, "workers": workers, "memory": memory,
    }


def processes_lines(processes: Document) -> list[str]:
    """What the controller has to tell: what does not simply serve, and what has been started again."""
    members = [processes["router"], *processes["workers"]] if processes else []
    lines = [
        f"{member['id']} is {member['state']}, restarts: {member['restarts']}"
        + (f" ({member['last_end']})" if member["last_end"] else "")
        for member in members if member["state"] != "serving" or member["restarts"]
    ]
    return [*lines, *_other_lines(processes)]


def _other_lines(processes: Document) -> list[str]:
    hosts = processes.get("hosts", [])
    lines = [f"host {host['address']}: pool {host['pool']}, {host['free_cpus']:g} CPUs free" for host in hosts]
    return lines + ([f"under way: {processes['operation']}"] if processes.get("operation") else [])


def _worker_document(worker: api_pb2.WorkerStatus) -> Document:
    return {
        "id": worker.id, "role": worker.role, "pid": worker.pid, "host": worker.host, "address": worker.address,
        "epoch": worker.epoch, "state": worker.state, "num_blocks_total": worker.num_blocks_total,
        "num_blocks_free": worker.num_blocks_free, "num_running": worker.num_running,
        "num_waiting": worker.num_waiting, "rss_bytes": worker.rss_bytes, "weights_bytes": worker.weights_bytes,
        "arena_bytes": worker.arena_bytes, "ops_backend": worker.ops_backend, "load_seconds": worker.load_seconds,
        "load_cpu_seconds": worker.load_cpu_seconds,
        "num_preempted": worker.num_preempted, "host_cache_bytes": worker.host_cache_bytes,
        "num_moves_total": worker.num_moves_total, "num_recomputed_total": worker.num_recomputed_total,
    }


def status_text(document: Document) -> str:
    """For people."""
    rows = [
        [
            worker["id"], worker["role"], worker["pid"], worker["host"], worker["address"],
            worker["epoch"][:EPOCH_CHARS], worker["state"],
            f"{worker['num_blocks_free']}/{worker['num_blocks_total']}", worker["num_running"], worker["num_waiting"],
            worker["num_preempted"], mib(worker["rss_bytes"]), mib(worker["weights_bytes"]),
            mib(worker["arena_bytes"]), worker["ops_backend"],
            f"{worker['load_seconds']:.1f} s ({worker['load_cpu_seconds']:.1f} CPU)",
        ]
        for worker in document["workers"]
    ]
    memory = document["memory"]
    lines = [
        f"cluster {document['cluster']!r}: {document['active_requests']} active requests, "
        f"up {document['uptime_seconds']:.0f} s, router is process {document['router_pid']}",
        table(COLUMNS, rows),
        f"resident: router {mib(memory['router_rss_bytes'])}, workers {mib(memory['workers_rss_bytes'])}"
        + (f", Ray and serve {mib(memory['ray_rss_bytes'])}, together {mib(memory['total_rss_bytes'])}"
           if memory["total_rss_bytes"] is not None else ""),
    ]
    return "\n".join(lines)
