"""`pd-relay doctor`: can this host serve, and how; or can those of a launcher file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_engine.errors import EXIT_CHECK_FAILED, InvalidArgument
from pd_engine.model.checkpoint import resolve_model
from pd_engine.settings import load_settings
from pd_ops.commands import options
from pd_ops.doctor.check import can_serve, checks_text
from pd_ops.doctor.suites import rows_checks, whole_checks
from pd_ops.output import Output


def command(
    context: typer.Context,
    model: options.Model = None,
    dtype: options.Dtype = None,
    ops: options.Ops = None,
    config: options.Config = None,
    hosts: Annotated[
        Path | None, typer.Option(help="Launcher file: its hosts are checked, with the settings that lie there.")
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows/--no-rows", help="Compare bits of the ops, which takes seconds of a processor.")
    ] = True,
    as_json: options.Json = False,
) -> None:
    """Check this host: processor, bits of the ops, versions, limits, ports. Exit status 1 if it cannot serve.

    Or the hosts of a launcher file, and whether they have the same and reach one another.
    """
    output = options.start(context, as_json)
    if hosts is not None:
        if any(one is not None for one in (model, dtype, ops, config)):
            raise InvalidArgument("--hosts checks hosts with the settings that lie there: it takes no others")
        _check_hosts(hosts, output, with_rows=rows)
        return
    settings = load_settings(config, options.overrides(model=model, engine__dtype=dtype, engine__ops=ops))
    path = resolve_model(settings.model)
    checks = [*whole_checks(settings, path), *(rows_checks(settings, path, output.note) if rows else [])]
    output.document({
        "can_serve": can_serve(checks), "model": str(path), "checks": [check.to_json() for check in checks],
    })
    output.text(checks_text(checks))
    if not can_serve(checks):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _check_hosts(path: Path, output: Output, *, with_rows: bool) -> None:
    from pd_ops.doctor.hosts import examine, lacking_kinds, reports, reports_text
    from pd_ops.launcher.cluster_file import read_cluster_file

    file = read_cluster_file(path)
    reported = reports(file, examine(file, with_rows=with_rows, tell=output.note))
    lacking = lacking_kinds(file, reported)
    output.document({"can_serve": not lacking, "hosts": [one.to_json() for one in reported]})
    output.text(reports_text(reported, lacking))
    if lacking:
        raise typer.Exit(EXIT_CHECK_FAILED)
