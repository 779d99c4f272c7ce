"""Ends on this host what a launcher file's start commands have begun: Ray, what Ray runs, and on the head `serve`.

    python -m pd_ops.launcher.end_host            all of the cluster, from the head: running requests may finish
    python -m pd_ops.launcher.end_host --crash    what is here, at once, before Ray is started again

Processes are known by a mark in the environment that they were started with (ops/deploy/host.env), and Ray's agents,
which wipe theirs, by the files of Ray's directory that they write. Prints {"ended": [pid, ...], "left": [pid, ...]}.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from pd_ops.cluster.guardian import cluster_processes, has_mark
from pd_ops.cluster.state_file import is_running, read_state, running_clusters, state_directory

MARK = b"PD_RELAY_HOST_MARK=pd-relay"
RAY_DIRECTORY = "/tmp/ray"
HEAD_MEMORY = Path("~/.pd-relay-gcs")
SERVE_S, TERM_S, KILL_S, POLL_S = 60.0, 2.0, 8.0, 0.05


def main() -> None:
    is_crash = sys.argv[1:] == ["--crash"]
    if not is_crash:
        for name in running_clusters():
            _end_serve(name)
    ended = [pid for pid in _marked() if _signal(pid, signal.SIGTERM)]
    _wait(TERM_S)
    for pid in _marked():
        _signal(pid, signal.SIGKILL)
    left = _wait(KILL_S)
    if not is_crash:
        shutil.rmtree(HEAD_MEMORY.expanduser(), ignore_errors=True)
        for path in state_directory().glob("*.autoscaler.hosts"):  # the next one begins with no hosts
            path.unlink()
    print(json.dumps({"ended": ended, "left": left}))


def _end_serve(name: str) -> None:
    """Ends the cluster that a controller of ours serves, which ends its processes on all hosts; other clusters stay."""
    pid = read_state(name).pid
    if not has_mark(str(pid), MARK):
        return
    _signal(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + SERVE_S
    while is_running(name) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _marked() -> list[int]:
    """All but this process and those above it: the shell that runs it may have the mark too."""
    above, pid = set(), os.getpid()
    while pid > 1:
        above.add(pid)
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return [pid for pid in cluster_processes(MARK, RAY_DIRECTORY) if pid not in above]


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _wait(seconds: float) -> list[int]:
    """Those that are still there after so long at most."""
    deadline_s = time.monotonic() + seconds
    while (left := _marked()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return left


if __name__ == "__main__":
    main()
