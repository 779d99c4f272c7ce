"""`pd-relay drill`: breaks something in a running cluster, and measures what clients see of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_engine.errors import EXIT_CHECK_FAILED, FailedPrecondition, InvalidArgument, PdRelayError, shown
from pd_engine.settings import Settings
from pd_ops.cluster.control_messages import SettingsRequest, StatusRequest
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.commands import options
from pd_ops.drills.access import Access, HostsAccess, LocalAccess
from pd_ops.drills.catalog import DRILLS
from pd_ops.drills.judging import not_run
from pd_ops.drills.replay import read_replay
from pd_ops.drills.report import DrillResult, summary, to_markdown
from pd_ops.drills.run import DrillPlan, DrillRunner
from pd_ops.drills.scene import describe, steady_requests
from pd_ops.launcher.cluster_file import read_cluster_file
from pd_ops.output import Document, Output
from pd_ops.verification.run import load_oracle

ALL = "all"


def command(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(help=f"One or more of {', '.join(DRILLS)}, or {ALL}.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether to break the cluster.")] = False,
    clients: Annotated[int, typer.Option(min=1, max=256, help="That ask one request after the other.")] = 4,
    distinct: Annotated[int, typer.Option(min=1, max=256, help="Different requests that they ask in turn.")] = 8,
    recovery: Annotated[
        float, typer.Option(min=1, help="Seconds in which the pools must be whole again, and each request answered.")
    ] = 120.0,
    report: Annotated[
        Path | None, typer.Option(help="Folder for drills.md and drills.json; default: no files.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The worker to break, by id; default: the busiest of the drill's role.")
    ] = None,
    during: Annotated[
        Path | None, typer.Option(help="Requests of this trace (Mooncake, Azure, ServeGen) when due, not of --clients.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, max=1e4, help="Requests a second of --during; default: the trace's.")
    ] = None,
    length_scale: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Its lengths times this; default: what fits the context.")
    ] = None,
    hosts: Annotated[
        Path | None, typer.Option(help="Launcher file: the cluster is on its hosts, whose drills need it.")
    ] = None,
    cluster: options.ClusterName = "default",
    as_json: options.Json = False,
) -> None:
    """Break something in a running cluster, under a stream of requests: one thing after the other. Exit status 1 if an
    expectation is not met.

    Only clusters that were started with --drillable are broken.
    """
    output = options.start(context, as_json)
    if (unknown := next((name for name in names if name not in (*DRILLS, ALL)), None)) is not None:
        raise InvalidArgument(f"a drill is one of {', '.join(DRILLS)}, or {ALL}; got {shown(unknown)}")
    if during is None and (rate is not None or length_scale is not None):
        raise InvalidArgument("--rate and --length-scale are of a trace: give --during as well")
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    access = LocalAccess(cluster) if hosts is None else HostsAccess(read_cluster_file(hosts), cluster, recovery)
    asked = _Asked(
        cluster=cluster, access=access, target=None if target is None else options.checked_worker(target),
        num_clients=clients, num_distinct=distinct, recovery_s=recovery, trace=during, rate_per_s=rate,
        length_scale=length_scale, report=report,
    )
    settings = asyncio.run(_drillable_settings(asked))
    _confirm(", ".join(names), cluster, yes=yes)
    document = asyncio.run(_drill(asked, settings, _all_of(names, access), output))
    output.document(document)
    output.text(_text(document))
    if not document["passed"]:
        raise typer.Exit(EXIT_CHECK_FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    cluster: str
    access: Access
    target: str | None
    num_clients: int
    num_distinct: int
    recovery_s: float
    trace: Path | None
    rate_per_s: float | None
    length_scale: float | None
    report: Path | None


def _all_of(names: list[str], access: Access) -> list[str]:
    """Each once. All: but those of hosts, where there are none."""
    every = [one for one, drill in DRILLS.items() if access.head or not drill.faults]
    return list(dict.fromkeys(one for name in names for one in (every if name == ALL else [name])))


async def _drillable_settings(asked: _Asked) -> Settings:
    """Raises:
    FailedPrecondition: the cluster is not to be broken.
    """
    settings = Settings.model_validate(await asked.access.ask(SettingsRequest(), lambda sentence: None))
    if not settings.cluster.drillable:
        raise FailedPrecondition(
            f"the cluster {asked.cluster!r} is not marked as drillable: start it with --drillable "
            f"(cluster.drillable) if it may be broken on purpose"
        )
    return settings


def _confirm(names: str, cluster: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgument("nobody is there to confirm that the cluster shall be broken: give --yes")
    typer.confirm(f"Break the cluster {cluster!r} on purpose ({names})?", abort=True, err=True)


async def _drill(asked: _Asked, settings: Settings, names: list[str], output: Output) -> Document:
    document = await unless(Interrupts().first, _drill_all(asked, settings, names, output))
    if document is None:
        raise KeyboardInterrupt
    return document


async def _drill_all(asked: _Asked, settings: Settings, names: list[str], output: Output) -> dict[str, Any]:
    address = (await asked.access.ask(StatusRequest(), output.note))["router"]["address"]
    model, info = await describe(address, asked.recovery_s)
    replay = None if asked.trace is None else read_replay(
        asked.trace, model, rate_per_s=asked.rate_per_s, length_scale=asked.length_scale
    )
    plan = DrillPlan(
        access=asked.access, address=address, target=asked.target, settings=settings, model=model,
        requests=steady_requests(asked.num_distinct, settings, model) if replay is None else replay.requests,
        schedule=None if replay is None else replay.schedule, num_clients=asked.num_clients,
        recovery_s=asked.recovery_s,
    )
    runner = DrillRunner(plan, await asyncio.to_thread(load_oracle, settings, model), output.note)
    roles = [worker.role for worker in info.workers]
    drilled = {
        "cluster": asked.cluster, "model": model.served_model_name, "clients": asked.num_clients,
        "pools": {role: roles.count(role) for role in ("prefill", "decode")},
        "trace": None if replay is None else replay.name,
        "rate_per_s": None if replay is None else round(replay.rate_per_s, 3),
    }
    results: list[DrillResult] = []
    for name in names:
        output.note(f"{name}: {DRILLS[name].sentence}")
        results.append(await _one(runner, name, is_only=len(names) == 1))
        output.note(f"{name}: {'passed' if results[-1].passed else 'FAILED'} in {results[-1].seconds:.0f} s")
        if asked.report is not None:
            _keep(summary(results, drilled), asked.report)
    return summary(results, drilled)


async def _one(runner: DrillRunner, name: str, *, is_only: bool) -> DrillResult:
    """One that cannot be done has failed, and others go on.

    Raises:
        PdRelayError: it cannot be done, and there are no others.
    """
    began_s = time.monotonic()
    try:
        return await runner.run(name)
    except PdRelayError as error:
        if is_only:
            raise
        seconds = time.monotonic() - began_s
        return not_run(name, DRILLS[name], error.message, seconds=seconds, load=os.getloadavg()[0])


def _keep(document: Document, folder: Path) -> None:
    """What was found so far: an interrupt leaves that."""
    (folder / "drills.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "drills.md").write_text(_text(document), encoding="utf-8")


def _text(document: Document) -> str:
    return to_markdown(document, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
