"""`pd-relay roll`: everything of a running cluster is started anew, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pd_engine.model.checkpoint import resolve_model
from pd_engine.settings import load_settings
from pd_engine.yaml_file import read_yaml_mapping
from pd_ops.cluster.control_messages import RollRequest
from pd_ops.commands import controlled, options
from pd_ops.output import Interrupted


def command(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Settings file: what it names stands over the settings that the cluster has.")
    ] = None,
    timeout: controlled.DrainTimeout = controlled.DEFAULT_DRAIN_S,
    cluster: options.ClusterName = "default",
    as_json: options.Json = False,
) -> None:
    """Replace every worker and the router, one after the other: a replacement serves before the old one drains."""
    output = options.start(context, as_json)
    request = RollRequest(drain_s=timeout, settings={} if config is None else named_settings(config))
    result = controlled.change(cluster, request, output)
    output.document(result)
    for one in result["replaced"]:
        output.text(f"{one['id']} was replaced by {one['by']}: {controlled.drained_text(one['drained'])}")
    if result["interrupted"]:
        raise Interrupted
    output.text("rolled: every process is new")


def named_settings(path: Path) -> dict[str, Any]:
    """What stands in a settings file, and nothing else.

    Raises:
        InvalidArgument, NotFound: something in it is wrong, or its model is not there.
    """
    named = read_yaml_mapping(path, "settings file")
    settings = load_settings(path)
    return {**named, "model": str(resolve_model(settings.model))} if "model" in named else named
