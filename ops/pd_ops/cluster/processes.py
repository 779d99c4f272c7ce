"""The processes of a cluster on this host: who they are, what they hold in memory, and that they are gone."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from pd_engine.errors import FailedPrecondition
from pd_ops.cluster import guardian

KILL_TIMEOUT_S = 5.0
GUARDIAN_TIMEOUT_S = guardian.GIVE_UP_S + 5.0
MARK_ENVIRONMENT = "PD_RELAY_CLUSTER_MARK"
MAX_BASE_CHARS = 40  # Ray's unix sockets lie about 62 characters deeper than its directory; 107 is the limit


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """All processes below `pid` (default: this one), however deep; none if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Resident memory of them together; one that has ended counts nothing. Shared pages count in each."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


def resident_bytes_below(pid: int, apart_from: Container[int]) -> int:
    """Resident memory of a serving process and all below it, but for these pids."""
    try:
        own = [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        own = []
    return resident_bytes(process for process in [*own, *descendants(pid)] if process.pid not in apart_from)


def end_processes(processes: Sequence[psutil.Process], grace_s: float) -> list[int]:
    """Waits for processes to end by themselves, kills those that have not after `grace_s`, and returns their pids."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=KILL_TIMEOUT_S)
    return [process.pid for process in alive]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guarded:
    """What the guardian looks after.

    Attributes:
        environment: every process started with this in its environment is ended when we are gone.
        directory: temporary, removed at the end.
        guardian_pid: the guardian's own.
    """

    environment: dict[str, str]
    directory: Path
    guardian_pid: int


@contextmanager
def guarded() -> Iterator[Guarded]:
    """A guardian process (see `guardian.py`) for the time of the context.

    Raises:
        FailedPrecondition: no temporary directory can be made.
    """
    base = tempfile.gettempdir()
    base = base if len(base) <= MAX_BASE_CHARS else "/tmp"
    try:
        directory = tempfile.mkdtemp(prefix="pd-relay-", dir=base)
    except OSError as error:
        raise FailedPrecondition(f"cannot make a directory in {base}: {error.strerror}; TMPDIR names another") from None
    value = secrets.token_hex(16)
    # In a session of its own: a Ctrl-C in the terminal, or a signal to our group, must not end it with us.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, f"{MARK_ENVIRONMENT}={value}", directory],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield Guarded(
            environment={MARK_ENVIRONMENT: value}, directory=Path(directory), guardian_pid=process.pid,
        )
    finally:
        process.stdin.close()
        try:
            process.wait(GUARDIAN_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)  # its work, if it was killed
