"""`pd-relay serve`: one cluster on this host, in the foreground."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pd_engine.errors import Unavailable
from pd_engine.settings import load_settings
from pd_ops.checked_model import with_checked_model
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.cluster.local import LocalCluster, RunningCluster, local_cluster
from pd_ops.cluster.members import MemberState
from pd_ops.commands import options
from pd_ops.detached import start_detached
from pd_ops.output import Document, Output


def command(
    context: typer.Context,
    model: options.Model = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port of the router; 0: any free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="HTTP port of the router; 0: any free one.")] = None,
    config: options.Config = None,
    speculate: options.ServerSpeculate = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    ops: options.Ops = None,
    cluster: Annotated[str | None, typer.Option(help="Name of this cluster on its host.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Join the Ray cluster at HOST:PORT; 'auto': the one of this host.")
    ] = None,
    by_pool: Annotated[
        bool | None, typer.Option("--by-pool", help="Each role on the hosts of its pool, by Ray's labels.")
    ] = None,
    detach: Annotated[
        Path | None, typer.Option(help="Go on in the background; this file gets what --json prints.")
    ] = None,
    drillable: Annotated[
        bool | None, typer.Option("--drillable", help="pd-relay drill may break this cluster on purpose.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Start a router, prefill and decode workers, and serve until Ctrl-C, SIGTERM or `pd-relay stop`."""
    began = time.monotonic()
    output = options.start(context, as_json)
    if detach is not None:
        pid = start_detached(sys.argv[1:], detach.expanduser())
        output.document({"event": "detached", "pid": pid, "file": str(detach)})
        output.text(f"process {pid} serves in the background; it tells in {detach} when it is ready")
        return
    overrides = options.overrides(
        model=model, prefill__workers=prefill, decode__workers=decode, router__grpc_port=grpc_port,
        router__http_port=http_port, decode__speculate=speculate, engine__dtype=dtype, engine__device=device,
        engine__ops=ops, cluster__name=cluster, cluster__ray_address=ray_address, cluster__drillable=drillable,
        cluster__by_pool=by_pool,
    )
    settings = with_checked_model(load_settings(config, overrides))
    with local_cluster(settings) as local:
        asyncio.run(_serve(local, output, began))
    output.document({"event": "stopped", "cluster": settings.cluster.name})
    output.note("stopped; no process is left")


async def _serve(local: LocalCluster, output: Output, began: float) -> None:
    interrupts = Interrupts()
    async with local.running(interrupts) as running:
        _report_ready(running, output, time.monotonic() - began)
        while (event := await unless(interrupts.first, running.controller.events.get())) is not None:
            output.document(event.to_json())
            output.note(event.sentence)
            running.keep_addresses()
            if running.controller.router.state is MemberState.ENDED:
                raise Unavailable("the router has died, and nobody can reach the workers without it")
        output.note("stopping (again Ctrl-C: at once)")


def _report_ready(running: RunningCluster, output: Output, seconds: float) -> None:
    state = running.state
    workers: list[Document] = [
        {"id": worker.worker_id, "role": worker.role.value, "pid": worker.pid, "address": worker.address,
         "epoch": worker.epoch}
        for worker in running.ready.workers
    ]
    output.document({
        "event": "ready", "cluster": state.name, "pid": state.pid, "model": state.model,
        "grpc_address": state.grpc_address, "http_address": state.http_address, "ray_address": state.ray_address,
        "router_pid": running.ready.router.pid, "workers": workers, "log_directory": state.log_directory,
        "seconds": round(seconds, 3),
    })
    output.text(f"ready in {seconds:.1f} s: cluster {state.name!r} serves {state.model}")
    output.text(f"  gRPC     {state.grpc_address}")
    output.text(f"  HTTP     {state.http_address}")
    output.text(f"  workers  {', '.join(worker.worker_id for worker in running.ready.workers)}")
    output.text(f"  logs     {state.log_directory}")
    output.text("Ctrl-C, or pd-relay stop, ends it")
