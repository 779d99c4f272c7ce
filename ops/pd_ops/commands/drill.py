"""`pd-relay drill`: breaks something in a running cluster, and measures what clients see of it."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_engine.errors import EXIT_CHECK_FAILED, FailedPrecondition, InvalidArgument, shown
from pd_engine.settings import Settings
from pd_ops.client import ready_state
from pd_ops.cluster.control_client import ask_controller
from pd_ops.cluster.control_messages import SettingsRequest
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.commands import options
from pd_ops.drills.catalog import DRILLS
from pd_ops.drills.report import DrillResult, summary, to_markdown
from pd_ops.drills.run import DrillPlan, DrillRunner
from pd_ops.drills.scene import describe, steady_requests
from pd_ops.output import Document, Output
from pd_ops.verification.run import load_oracle

ALL = "all"


def command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"{', '.join(DRILLS)}, or {ALL}.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether to break the cluster.")] = False,
    clients: Annotated[int, typer.Option(min=1, max=256, help="That ask one request after the other.")] = 4,
    distinct: Annotated[int, typer.Option(min=1, max=256, help="Different requests that they ask in turn.")] = 8,
    recovery: Annotated[
        float, typer.Option(min=1, help="Seconds in which the pools must be whole again, and each request answered.")
    ] = 120.0,
    report: Annotated[
        Path | None, typer.Option(help="Folder for drills.md and drills.json; default: no files.")
    ] = None,
    cluster: options.ClusterName = "default",
    as_json: options.Json = False,
) -> None:
    """Break something in a running cluster, under a stream of requests. Exit status 1 if an expectation is not met.

    Only clusters that were started with --drillable are broken.
    """
    output = options.start(context, as_json)
    if name not in (*DRILLS, ALL):
        raise InvalidArgument(f"a drill is one of {', '.join(DRILLS)}, or {ALL}; got {shown(name)}")
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    settings = asyncio.run(_drillable_settings(cluster))
    _confirm(name, cluster, yes=yes)
    names = list(DRILLS) if name == ALL else [name]
    document = asyncio.run(_drill(cluster, settings, names, output, (clients, distinct, recovery)))
    text = to_markdown(document, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    if report is not None:
        (report / "drills.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (report / "drills.md").write_text(text, encoding="utf-8")
    output.document(document)
    output.text(text)
    if not document["passed"]:
        raise typer.Exit(EXIT_CHECK_FAILED)


async def _drillable_settings(cluster: str) -> Settings:
    """Raises:
    FailedPrecondition: the cluster is not to be broken.
    """
    settings = Settings.model_validate(await ask_controller(cluster, SettingsRequest()))
    if not settings.cluster.drillable:
        raise FailedPrecondition(
            f"the cluster {cluster!r} is not marked as drillable: start it with --drillable (cluster.drillable) if it "
            f"may be broken on purpose"
        )
    return settings


def _confirm(name: str, cluster: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument("nobody is there to confirm that the cluster shall be broken: give --yes")
    typer.confirm(f"Break the cluster {cluster!r} on purpose ({name})?", abort=True, err=True)


async def _drill(
    cluster: str, settings: Settings, names: list[str], output: Output, sizes: tuple[int, int, float]
) -> Document:
    document = await unless(Interrupts().first, _drill_all(cluster, settings, names, output, sizes))
    if document is None:
        raise KeyboardInterrupt
    return document


async def _drill_all(
    cluster: str, settings: Settings, names: list[str], output: Output, sizes: tuple[int, int, float]
) -> dict[str, Any]:
    num_clients, num_distinct, recovery_s = sizes
    address = ready_state(cluster).grpc_address
    model, info = await describe(address, recovery_s)
    plan = DrillPlan(
        cluster=cluster, address=address, settings=settings, model=model,
        requests=steady_requests(num_distinct, settings, model), num_clients=num_clients, recovery_s=recovery_s,
    )
    runner = DrillRunner(plan, await asyncio.to_thread(load_oracle, settings, model), output.note)
    results: list[DrillResult] = []
    for name in names:
        output.note(f"{name}: {DRILLS[name].sentence}")
        results.append(await runner.run(name))
        output.note(f"{name}: {'passed' if results[-1].passed else 'FAILED'} in {results[-1].seconds:.0f} s")
    roles = [worker.role for worker in info.workers]
    return summary(results, {
        "cluster": cluster, "model": model.served_model_name, "clients": num_clients,
        "pools": {role: roles.count(role) for role in ("prefill", "decode")},
    })
