"""`pd-relay role`: a worker of a running cluster goes over to the other pool."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_engine.errors import InvalidArgument, shown
from pd_ops.cluster.control_messages import RoleRequest
from pd_ops.commands import controlled, options


def command(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="Its id, as in pd-relay status.")],
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    timeout: controlled.DrainTimeout = controlled.DEFAULT_DRAIN_S,
    cluster: options.ClusterName = "default",
    as_json: options.Json = False,
) -> None:
    """Move a worker to the other pool: a new process of that role serves first, then the old one drains and ends."""
    output = options.start(context, as_json)
    if role not in ("prefill", "decode"):
        raise InvalidArgument(f"a role is prefill or decode, got {shown(role)}")
    request = RoleRequest(
        worker=options.checked_worker(worker), role="prefill" if role == "prefill" else "decode", drain_s=timeout
    )
    result = controlled.change(cluster, request, output)
    output.document(result)
    output.text(
        f"{worker} was replaced by {result['replaced_by']}, in a process of its own: "
        f"{controlled.drained_text(result['drained'])}; {controlled.pools_text(result['pools'])}"
    )
