"""Ends a cluster's processes when the process that served it was killed and could not do it itself.

Ray's control store and raylet die with their driver and workers follow their raylet, but Ray's agents linger for a
minute or more. So this script runs beside the cluster (standard library only, a few MB). Its standard input is a pipe
that only the serving process holds open: when it ends, that process is gone or done. Processes of the cluster are
known by a mark in the environment that they were started with, and, as Ray's agents wipe theirs, by the files of the
cluster's temporary directory that they write to; those that are still there after a grace are killed, and the
directory is removed.

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


def cluster_processes(mark: bytes, directory: str) -> list[int]:
    """Pids of this user's processes that were started with `mark` in their environment, or write to `directory`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if has_mark(name, mark) or writes_below(name, directory + "/"):
                    found.append(int(name))
            except OSError:  # it has ended, or is somebody else's
                continue
    return found


def has_mark(pid: str, mark: bytes) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return mark in file.read().split(b"\0")


def writes_below(pid: str, prefix: str) -> bool:
    """Whether a process has a file whose path begins with `prefix` open for writing. (A reader may be anybody.)"""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(prefix):
            with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as file:
                flags = next(line.split()[1] for line in file if line.startswith("flags:"))
            if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


def main() -> None:
    mark, directory, parent = os.fsencode(sys.argv[1]), sys.argv[2], os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    ended = time.monotonic()
    while time.monotonic() < ended + GIVE_UP_S:
        # The parent may be alive, and done with the cluster: it is not for us to end.
        processes = [pid for pid in cluster_processes(mark, directory) if pid != parent]
        if not processes:
            break
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
