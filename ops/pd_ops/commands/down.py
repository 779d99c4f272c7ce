"""`pd-relay down`: ends a cluster on all its hosts."""

from __future__ import annotations

from pathlib import Path

import typer

from pd_ops.commands import options
from pd_ops.commands.up import ClusterFileArgument
from pd_ops.launcher.cluster_file import read_cluster_file


def command(
    context: typer.Context, file: ClusterFileArgument = Path("cluster.yaml"), as_json: options.Json = False
) -> None:
    """End the cluster of a launcher file: running requests may finish first; no process is left on any host."""
    from pd_ops.launcher.launch import take_down  # imports Ray

    output = options.start(context, as_json)
    try:
        ended = take_down(read_cluster_file(file), output.note)
    except KeyboardInterrupt:
        output.note(f"interrupted: hosts may have processes left; pd-relay down {file} again ends them")
        raise
    output.document({"hosts": ended})
    output.text("ended; no process is left" + "".join(
        f"\n  {host}: {len(one['ended'])} processes ended" for host, one in ended.items()
    ))
