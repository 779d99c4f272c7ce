"""`pd-relay roll`: everything of a running cluster is started anew, and nothing is lost."""

from __future__ import annotations

import typer

from pd_ops.cluster.control_messages import RollRequest
from pd_ops.commands import controlled, options
from pd_ops.output import Interrupted


def command(
    context: typer.Context,
    timeout: controlled.DrainTimeout = controlled.DEFAULT_DRAIN_S,
    cluster: options.ClusterName = "default",
    as_json: options.Json = False,
) -> None:
    """Replace every worker and the router, one after the other: a replacement serves before the old one drains."""
    output = options.start(context, as_json)
    result = controlled.change(cluster, RollRequest(drain_s=timeout), output)
    output.document(result)
    for one in result["replaced"]:
        output.text(f"{one['id']} was replaced by {one['by']}: {controlled.drained_text(one['drained'])}")
    if result["interrupted"]:
        raise Interrupted
    output.text("rolled: every process is new")
