"""`pd-relay verify`: many requests in one process and through a cluster; every token, bit and byte compared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from pd_engine.errors import EXIT_CHECK_FAILED
from pd_engine.model.config import ModelConfig, cache_layout
from pd_engine.settings import Settings, load_settings
from pd_ops.checked_model import with_checked_model
from pd_ops.client import checked_address
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.cluster.local import LocalCluster, local_cluster
from pd_ops.commands import options
from pd_ops.output import Output
from pd_ops.verification.report import Report
from pd_ops.verification.run import VerificationPlan, verify

DEFAULT_COUNT = 50
OWN_ROOM_TOKENS = 4_096
OWN_PROJECTED_TOKENS = 16
MIB = 1024 * 1024


def command(
    context: typer.Context,
    model: options.Model = None,
    count: Annotated[int, typer.Option(min=1, help="Requests to compare over cold caches.")] = DEFAULT_COUNT,
    warm: Annotated[
        int | None, typer.Option(min=0, help="Then requests that find these in the caches.  [default: half as many]")
    ] = None,
    resumed: Annotated[int, typer.Option(min=0, help="Then answers that are resumed from every index.")] = 2,
    splits: Annotated[
        int, typer.Option(min=0, help="Then prompts of which every split between cached and new is run.")
    ] = 1,
    press: Annotated[
        bool, typer.Option(help="Then more at once than a decode worker has room for, if its room is small enough.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal requests.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time in the cluster.")] = 4,
    against: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Router of a running cluster; default: starts its own.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers of its own cluster.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers of its own cluster.")] = None,
    speculate: options.ServerSpeculate = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    ops: options.Ops = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Check that a cluster gives bit for bit what one process gives. Exit status 1 if anything differs."""
    output = options.start(context, as_json)
    overrides = options.overrides(
        model=model, prefill__workers=prefill, decode__workers=decode, decode__speculate=speculate,
        decode__adaptive_speculation=False,  # drafts are made, whether they pay or not: they are what is checked
        engine__dtype=dtype, engine__device=device, engine__ops=ops, cluster__name="verify",
        router__grpc_port=0, router__http_port=0,
    )
    settings = with_checked_model(load_settings(config, overrides))
    plan = VerificationPlan(
        count=count, num_warm=count // 2 if warm is None else warm, num_resumed=resumed, num_splits=splits,
        presses=press, seed=seed, concurrency=concurrency,
    )
    if against is None and config is None:
        settings = _with_small_room(settings)
    if against is not None:
        report = asyncio.run(verify(checked_address(against), settings, plan, output.note))
    else:
        with local_cluster(settings) as local:
            report = asyncio.run(_verify_own(local, settings, plan, output))
    output.document(report.to_json())
    output.text(report.to_text())
    if report.different:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _with_small_room(settings: Settings) -> Settings:
    """With caches that `OWN_ROOM_TOKENS` fill, and choices that are admitted before all of their blocks are there."""
    config = ModelConfig.load(Path(settings.model))
    dtype = "fp32" if settings.engine.dtype == "fp32" else "bf16"
    layout = cache_layout(config, dtype, settings.engine.block_size, config.has_mtp)
    num_bytes = OWN_ROOM_TOKENS * layout.bytes_per_token
    return settings.model_copy(update={
        "engine": settings.engine.model_copy(update={"cache_mib": -(-num_bytes // MIB)}),
        "decode": settings.decode.model_copy(update={"projected_tokens": OWN_PROJECTED_TOKENS}),
    })


async def _verify_own(local: LocalCluster, settings: Settings, plan: VerificationPlan, output: Output) -> Report:
    interrupts = Interrupts()
    output.note("starting a cluster")
    async with local.running(interrupts) as running:
        work = verify(running.state.grpc_address, settings, plan, output.note)
        report = await unless(interrupts.first, work)
    if report is None:
        raise KeyboardInterrupt
    return report

