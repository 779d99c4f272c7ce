"""`pd-relay demo`: a cluster on this host, answers to watch, and the proof that they are what one process gives."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from pd_engine.contracts import api_pb2
from pd_engine.errors import EXIT_CHECK_FAILED
from pd_engine.settings import Settings, load_settings
from pd_ops.checked_model import with_checked_model
from pd_ops.client import Completion, RouterClient, router_client
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.cluster.local import LocalCluster, RunningCluster, local_cluster
from pd_ops.commands import options
from pd_ops.commands.status import status_document, status_text
from pd_ops.demonstration import DemoReport, DemoRequest, DemoResult, concurrent_requests, shown_requests
from pd_ops.output import Output
from pd_ops.request_options import to_request
from pd_ops.verification.oracle import expected_outcome
from pd_ops.verification.outcome import first_difference, outcome_of
from pd_ops.verification.remote import Pair, cold_placement, cold_placements, run_remote, worker_pairs
from pd_ops.verification.run import load_oracle


def command(
    context: typer.Context,
    model: options.Model = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    speculate: options.ServerSpeculate = None,
    dtype: options.Dtype = None,
    ops: options.Ops = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Start a cluster, stream a few answers, compare all with one process. Exit status 1 if anything differs."""
    began = time.monotonic()
    output = options.start(context, as_json)
    overrides = options.overrides(
        model=model, prefill__workers=prefill, decode__workers=decode, decode__speculate=speculate,
        decode__adaptive_speculation=False,  # drafts are made, whether they pay or not: they are what is checked
        engine__dtype=dtype, engine__ops=ops, cluster__name="demo", router__grpc_port=0, router__http_port=0,
    )
    settings = with_checked_model(load_settings(config, overrides))
    output.text("starting Ray, a router and two pools of workers, each a process of its own ...")
    with local_cluster(settings) as local:
        report = asyncio.run(_demo(local, settings, output, began))
    output.document(report.to_json())
    output.text(report.to_text())
    if report.num_identical != len(report.results):
        raise typer.Exit(EXIT_CHECK_FAILED)


async def _demo(local: LocalCluster, settings: Settings, output: Output, began: float) -> DemoReport:
    interrupts = Interrupts()
    async with local.running(interrupts) as running:
        ready_seconds = time.monotonic() - began
        report = await unless(interrupts.first, _show(running, settings, output, began, ready_seconds))
    if report is None:
        raise KeyboardInterrupt
    return report


async def _show(
    running: RunningCluster, settings: Settings, output: Output, began: float, ready_seconds: float
) -> DemoReport:
    shown, together = shown_requests(), concurrent_requests()
    async with router_client(running.state.grpc_address) as client:
        info, server = await client.model_info(), await client.server_info()
        pairs = worker_pairs(server)
        output.text(f"ready after {ready_seconds:.1f} s\n{status_text(status_document(server, running.state.pid))}\n")
        completions = [await _stream(client, request, pairs, output) for request in shown]
        output.text(f"now {len(together)} requests at the same time ...")
        completions += await run_remote(
            client, [request.request for request in together], cold_placements(pairs, len(together)),
            concurrency=len(together),
        )
        output.text("the same requests in one process, to compare every token, logprob bit and block ...\n")
        results = await _compare([*shown, *together], completions, settings, info)
        memory = status_document(await client.server_info(), running.state.pid)["memory"]
    return DemoReport(
        results=tuple(results), bytes_per_token=info.bytes_per_token, total_rss_bytes=memory["total_rss_bytes"],
        ready_seconds=ready_seconds, seconds=time.monotonic() - began,
    )


async def _stream(client: RouterClient, request: DemoRequest, pairs: list[Pair], output: Output) -> Completion:
    output.text(f"> {request.text}", end="")
    placement = cold_placement(pairs[0])
    completion = await client.complete(
        to_request(request.request.prompt, request.request.sampling, placement=placement),
        lambda chunk: output.text(chunk.text, end=""),
    )
    output.text("\n")
    return completion


async def _compare(
    requests: list[DemoRequest], completions: list[Completion], settings: Settings,
    info: api_pb2.GetModelInfoResponse,
) -> list[DemoResult]:
    oracle = await asyncio.to_thread(load_oracle, settings, info)
    results = []
    for request, completion in zip(requests, completions, strict=True):
        expected = await asyncio.to_thread(expected_outcome, oracle, request.request)
        got = outcome_of(completion.complete)
        results.append(DemoResult(
            outcome=got, timing=completion.timing, accepted_tokens=completion.complete.accepted_tokens,
            drafted_tokens=completion.complete.drafted_tokens,
            difference=first_difference(expected, got, bytes_per_token=info.bytes_per_token),
        ))
    return results
