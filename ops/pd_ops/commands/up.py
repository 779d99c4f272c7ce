"""`pd-relay up`: a cluster on the hosts of a launcher file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_ops.commands import options
from pd_ops.launcher.cluster_file import read_cluster_file

ClusterFileArgument = Annotated[Path, typer.Argument(help="The launcher file.")]


def command(
    context: typer.Context,
    file: ClusterFileArgument = Path("cluster.yaml"),
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until it must serve, once its head runs.")] = 300.0,
    as_json: options.Json = False,
) -> None:
    """Start a cluster on the hosts that a launcher file names, and return when it serves.

    Typed again, it starts the head anew, which takes over all that serves.
    """
    from pd_ops.launcher.launch import bring_up  # imports Ray

    output = options.start(context, as_json)
    try:
        ready = bring_up(read_cluster_file(file), timeout, output.note)
    except KeyboardInterrupt:
        output.note(f"interrupted: what has been started goes on; pd-relay down {file} ends it, up begins again")
        raise
    output.document(ready)
    workers = ", ".join(f"{one['id']} on {one['address'].rpartition(':')[0]}" for one in ready["workers"])
    output.text(f"ready: gRPC {ready['grpc_address']}, HTTP {ready['http_address']}; {workers}")
