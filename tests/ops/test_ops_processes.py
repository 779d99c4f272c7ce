"""The guardian ends what a killed process left behind, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from pd_ops.cluster.processes import descendants, end_processes, guarded, resident_bytes, resident_bytes_below

WAIT_S = 20.0

SERVING = """
import json, os, subprocess, sys, time
from pd_ops.cluster.processes import guarded

with guarded() as guard:
    marked = subprocess.Popen(["sleep", "600"], env={**os.environ, **guard.environment}, start_new_session=True)
    log = guard.directory / "log"
    with log.open("w") as file:
        writing = subprocess.Popen(["sleep", "600"], stdout=file, start_new_session=True)
    with log.open() as file:
        other = subprocess.Popen(["sleep", "600"], stdin=file, start_new_session=True)
    print(json.dumps({
        "marked": marked.pid, "writing": writing.pid, "other": other.pid, "guardian": guard.guardian_pid,
        "directory": str(guard.directory),
    }), flush=True)
    time.sleep(600)
"""


def test_a_killed_process_leaves_nothing_behind() -> None:
    """What was started with its mark or writes to its directory is ended; what only reads there is somebody else's."""
    serving = subprocess.Popen([sys.executable, "-c", SERVING], stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    told = json.loads(serving.stdout.readline())
    marked, writing, guardian, other = (
        psutil.Process(told[name]) for name in ("marked", "writing", "guardian", "other")
    )
    try:
        assert Path(told["directory"]).is_dir()
        serving.send_signal(signal.SIGKILL)
        serving.wait()
        _, alive = psutil.wait_procs([marked, writing, guardian], timeout=WAIT_S)
        assert alive == []
        assert other.is_running()
        assert not Path(told["directory"]).exists()
    finally:
        other.kill()


def test_nothing_is_left_after_the_context() -> None:
    with guarded() as guard:
        assert psutil.pid_exists(guard.guardian_pid)
        assert guard.directory.is_dir()
        own_log = (guard.directory / "log").open("w", encoding="utf-8")  # as Ray does: the guardian must not mind
    own_log.close()
    assert not psutil.pid_exists(guard.guardian_pid)
    assert not guard.directory.exists()


def test_signals_do_not_end_the_guardian() -> None:
    """A Ctrl-C reaches every process of the terminal's group, and some send SIGTERM to it."""
    ending = {1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with guarded() as guard:
        assert os.getsid(guard.guardian_pid) != os.getsid(0)
        status = Path(f"/proc/{guard.guardian_pid}/status")
        while True:  # until the interpreter has come so far; the test's timeout ends it otherwise
            line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("SigIgn"))
            if all(int(line.split()[1], 16) & bit for bit in ending):
                break


def test_ending_processes_and_their_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
                             stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    found = [process for process in descendants() if process.pid == child.pid]
    assert len(found) == 1
    with_child = resident_bytes_below(os.getpid(), apart_from=set())
    assert with_child >= resident_bytes_below(os.getpid(), apart_from={child.pid}) > 0
    assert resident_bytes(found) > 2**20
    assert end_processes(found, grace_s=0.0) == [child.pid]
    child.wait()
    assert resident_bytes(found) == 0
    assert end_processes(found, grace_s=0.0) == []
