"""Ends a cluster's processes when the process that served it was killed and could not do it itself.

Ray's control store and raylet die with their driver and workers follow their raylet, but Ray's agents linger for a
minute or more. So this script runs beside the cluster (standard library only, a few MB). Its standard input is a pipe
that only the serving process holds open: when it ends, that process is gone or done. Processes of the cluster are
known by a mark in the environment that they were started with; those that are still there after a grace are killed,
and the cluster's temporary directory is removed.

    python -I -S guardian.py MARK DIRECTORY      MARK is "NAME=value", as it stands in the environment
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

GRACE_S = 1.0
GIVE_UP_S = 10.0
POLL_S = 0.05


def marked_processes(mark: bytes) -> list[int]:
    """Pids of this user's processes that were started with `mark` in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(name))
            except OSError:  # it has ended, or is somebody else's
                continue
    return found


def main() -> None:
    mark, directory = os.fsencode(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    ended = time.monotonic()
    while (processes := marked_processes(mark)) and time.monotonic() < ended + GIVE_UP_S:
        if time.monotonic() > ended + GRACE_S:
            for pid in processes:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(POLL_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
