"""`pd-relay drain`: one worker of a running cluster ends, and nobody notices."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_ops.cluster.control_messages import DrainRequest
from pd_ops.commands import controlled, options


def command(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="Its id, as in pd-relay status.")],
    timeout: controlled.DrainTimeout = controlled.DEFAULT_DRAIN_S,
    cluster: options.ClusterName = "default",
    as_json: options.Json = False,
) -> None:
    """End a worker: it takes nothing new, its requests finish and its blocks are fetched, then its process ends."""
    output = options.start(context, as_json)
    request = DrainRequest(worker=options.checked_worker(worker), drain_s=timeout)
    result = controlled.change(cluster, request, output)
    output.document(result)
    output.text(
        f"drained {worker}: {controlled.drained_text(result['drained'])}; {controlled.pools_text(result['pools'])}"
    )
