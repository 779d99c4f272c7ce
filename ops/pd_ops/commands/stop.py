"""`pd-relay stop`: ends a cluster of this host, and sees that no process of it is left."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated

import typer

from pd_engine.errors import DeadlineExceeded
from pd_ops.cluster.processes import descendants, end_processes
from pd_ops.cluster.state_file import Phase, is_running, read_state
from pd_ops.commands import options

POLL_S = 0.05
LEFTOVER_GRACE_S = 3.0


def command(
    context: typer.Context,
    cluster: options.ClusterName = "default",
    timeout: Annotated[float, typer.Option(help="Seconds to wait before it is killed.", min=0)] = 60.0,
    as_json: options.Json = False,
) -> None:
    """Stop a cluster that was started by `pd-relay serve` on this host: running requests may finish first."""
    output = options.start(context, as_json)
    state = read_state(cluster)
    processes = descendants(state.pid)
    # A second signal would end it without waiting for running requests: one that is stopping is waited for.
    forced = not _terminate(cluster, state.pid, timeout, is_asked=state.phase is Phase.STOPPING)
    left = end_processes(processes, LEFTOVER_GRACE_S)
    output.document({"cluster": cluster, "pid": state.pid, "stopped": True, "forced": forced, "killed_pids": left})
    output.text(f"stopped {cluster!r}" + (" (it had to be killed)" if forced else "") + "; no process is left")


def _terminate(cluster: str, pid: int, timeout_s: float, *, is_asked: bool) -> bool:
    """Asks the serving process to end (unless it was), and waits; kills it after `timeout_s`. Whether it ended itself.

    Raises:
        DeadlineExceeded: it is still there after it was killed.
    """
    for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, LEFTOVER_GRACE_S)):
        try:
            if number is signal.SIGKILL or not is_asked:
                os.kill(pid, number)
        except ProcessLookupError:
            return True
        deadline = time.monotonic() + wait_s
        while is_running(cluster) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if not is_running(cluster):
            return number is signal.SIGTERM
    raise DeadlineExceeded(f"process {pid}, which serves {cluster!r}, does not end")

