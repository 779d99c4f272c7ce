"""`pd-relay top`: the pools of a running cluster, live in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

import typer

from pd_engine.contracts import api_pb2
from pd_engine.errors import Unavailable
from pd_ops.client import RouterClient, find_router, router_client
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.commands import options
from pd_ops.output import Document, Output
from pd_ops.tables import mib, table

COLUMNS = (
    "worker", "state", "blocks in use", "", "running", "waiting", "in host memory", "leases", "pins", "queued tokens",
    "prefill/s", "between tokens", "resident",
)
BAR_CHARS = 12
CLEAR = "\x1b[H\x1b[2J"


def command(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    looks: Annotated[int | None, typer.Option(min=1, help="End after so many; default: on Ctrl-C.")] = None,
    cluster: options.ClusterName = "default",
    address: options.Address = None,
    grpc_port: options.GrpcPort = None,
    as_json: options.Json = False,
) -> None:
    """Show requests, workers, their blocks, queues and speeds, again and again until Ctrl-C."""
    output = options.start(context, as_json)
    def find() -> str:
        return find_router(address=address, grpc_port=grpc_port, cluster=cluster)

    asyncio.run(_watch(find, output, interval, looks))


async def _watch(find: Callable[[], str], output: Output, interval_s: float, num_looks: int | None) -> None:
    """`find`: where the router is; one that is not reached may be elsewhere when it is back."""
    interrupts, is_only_one = Interrupts(), num_looks == 1
    while True:
        async with router_client(find()) as client:
            is_there = True
            while is_there:
                is_there = await _look(client, output, is_only_one=is_only_one)
                num_looks = None if num_looks is None else num_looks - 1
                if num_looks == 0 or await unless(interrupts.first, _slept(interval_s)) is None:
                    return


async def _look(client: RouterClient, output: Output, *, is_only_one: bool) -> bool:
    """Whether there was something to see."""
    try:
        document = top_document(await client.server_info(), await client.all_loads())
    except Unavailable as error:
        if is_only_one:
            raise
        output.note(error.message)  # the router is being started again
        return False
    output.document(document)
    output.text(("" if is_only_one else CLEAR) + top_text(document))
    return True


def top_document(info: api_pb2.GetServerInfoResponse, loads: api_pb2.GetLoadsResponse) -> Document:
    """The documented keys."""
    by_id = {load.worker_id: load for load in loads.loads}
    return {
        "cluster": info.cluster,
        "uptime_seconds": info.uptime_seconds,
        "requests_running": max(0, info.active_requests - loads.num_requests_waiting),
        "requests_waiting": loads.num_requests_waiting,
        "router_stage_seconds": _seconds(loads.router_stages),
        "workers": [_worker(worker, by_id.get(worker.id, api_pb2.WorkerLoad())) for worker in info.workers],
    }


def _seconds(stages: Iterable[api_pb2.StageSeconds]) -> dict[str, float]:
    return {one.stage: one.seconds for one in stages}


def _worker(worker: api_pb2.WorkerStatus, load: api_pb2.WorkerLoad) -> Document:
    return {
        "id": worker.id, "role": worker.role, "state": worker.state, "num_blocks_total": load.num_blocks_total,
        "num_blocks_free": load.num_blocks_free, "num_running": load.num_running, "num_waiting": load.num_waiting,
        "num_preempted": worker.num_preempted, "num_leases": load.num_leases, "num_pins": load.num_pins,
        "queued_prefill_tokens": load.queued_prefill_tokens, "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "itl_ms": load.itl_ms, "rss_bytes": worker.rss_bytes, "stage_seconds": _seconds(load.stages),
        "watched_seconds": load.watched_seconds,
    }


def top_text(document: Document) -> str:
    """One screen."""
    rows = []
    for worker in document["workers"]:
        total = worker["num_blocks_total"]
        share = 1 - worker["num_blocks_free"] / total if total else 0.0
        speed, itl_ms = worker["prefill_tokens_per_s"], worker["itl_ms"]
        rows.append([
            worker["id"], worker["state"], f"{100 * share:.0f} % of {total}", bar(share), worker["num_running"],
            worker["num_waiting"], worker["num_preempted"], worker["num_leases"], worker["num_pins"],
            worker["queued_prefill_tokens"], f"{speed:.0f}" if speed else "-", f"{itl_ms:.1f} ms" if itl_ms else "-",
            mib(worker["rss_bytes"]),
        ])
    stages = [stages_text(one["id"], one["stage_seconds"], one["watched_seconds"]) for one in document["workers"]]
    return "\n".join([
        f"cluster {document['cluster']!r}, up {document['uptime_seconds']:.0f} s: {document['requests_running']} "
        f"requests on workers, {document['requests_waiting']} in line\n{table(COLUMNS, rows)}",
        stages_text("router", document["router_stage_seconds"], document["uptime_seconds"]),
        *(text for text in stages if text),
    ])


def stages_text(who: str, seconds: Mapping[str, float], of_s: float) -> str:
    """Such as "decode-0: experts 41 %, attention 30 %"; empty if nothing is timed there. Of a router's whole life, of a
    worker's watched steps."""
    if not of_s:
        return ""
    shares = {stage: spent / of_s for stage, spent in seconds.items()}
    shares["else"] = max(0.0, 1 - sum(shares.values()))
    return f"{who}: {', '.join(f'{stage} {100 * share:.1f} %' for stage, share in shares.items())}"


def bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR_CHARS)
    return "#" * full + "." * (BAR_CHARS - full)


async def _slept(seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return True
