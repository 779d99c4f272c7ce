"""`pd-relay top`: the pools of a running cluster, live in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from pd_engine.contracts import api_pb2
from pd_engine.errors import Unavailable
from pd_ops.client import RouterClient, find_router, router_client
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.commands import options
from pd_ops.output import Document, Output
from pd_ops.top_screen import Screen

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
    """Show requests, pools, workers, their blocks, queues, speeds and stages, again and again until Ctrl-C.

    One look: since the router and each worker began. Several: since the look before, with those before it.
    """
    output = options.start(context, as_json)
    def find() -> str:
        return find_router(address=address, grpc_port=grpc_port, cluster=cluster)

    asyncio.run(_watch(find, output, interval, looks))


async def _watch(find: Callable[[], str], output: Output, interval_s: float, num_looks: int | None) -> None:
    """`find`: where the router is; one that is not reached may be elsewhere when it is back."""
    interrupts, is_only_one, screen = Interrupts(), num_looks == 1, Screen()
    while True:
        async with router_client(find()) as client:
            is_there: bool | None = True
            while is_there:
                is_there = await unless(interrupts.first, _look(client, output, screen, is_only_one=is_only_one))
                if is_there is None:
                    return
                num_looks = None if num_looks is None else num_looks - 1
                if num_looks == 0 or await unless(interrupts.first, _slept(interval_s)) is None:
                    return


async def _look(client: RouterClient, output: Output, screen: Screen, *, is_only_one: bool) -> bool:
    """Whether there was something to see."""
    try:
        document = top_document(await client.server_info(), await client.all_loads())
    except Unavailable as error:
        if is_only_one:
            raise
        output.note(error.message)  # the router is being started again
        return False
    output.document(document)
    output.text(("" if is_only_one or not output.is_terminal else CLEAR) + screen.text(document))
    return True


def top_document(info: api_pb2.GetServerInfoResponse, loads: api_pb2.GetLoadsResponse) -> Document:
    """The documented keys."""
    by_id = {load.worker_id: load for load in loads.loads}
    return {
        "cluster": info.cluster,
        "uptime_seconds": info.uptime_seconds,
        "requests_running": max(0, info.active_requests - loads.num_requests_waiting),
        "requests_waiting": loads.num_requests_waiting,
        "num_handoffs_total": loads.num_handoffs_total,
        "handoff_bytes_total": loads.handoff_bytes_total,
        "num_drafted_total": loads.num_drafted_total,
        "num_accepted_total": loads.num_accepted_total,
        "expert_max_over_mean": {skew.role: [one or None for one in skew.max_over_mean] for skew in loads.experts},
        "router_stage_seconds": _seconds(loads.router_stages),
        "workers": [_worker(worker, by_id.get(worker.id, api_pb2.WorkerLoad())) for worker in info.workers],
    }


def _seconds(stages: Iterable[api_pb2.StageSeconds]) -> dict[str, float]:
    return {one.stage: one.seconds for one in stages}


def _worker(worker: api_pb2.WorkerStatus, load: api_pb2.WorkerLoad) -> Document:
    return {
        "id": worker.id, "role": worker.role, "epoch": worker.epoch, "state": worker.state,
        "num_blocks_total": load.num_blocks_total, "num_quarantined_blocks": load.num_quarantined_blocks,
        "num_blocks_free": load.num_blocks_free, "num_running": load.num_running, "num_waiting": load.num_waiting,
        "num_preempted": worker.num_preempted, "num_leases": load.num_leases, "num_pins": load.num_pins,
        "queued_prefill_tokens": load.queued_prefill_tokens, "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "itl_ms": load.itl_ms, "rss_bytes": worker.rss_bytes, "stage_seconds": _seconds(load.stages),
        "watched_seconds": load.watched_seconds, "fetched_bytes_total": load.fetched_bytes_total,
    }


async def _slept(seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return True
