"""A lifeline: connections that end with a killed process, from a table of files that only one of its threads has."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from pd_engine.service import lifeline
from pd_engine.service.lifeline import Lifeline

HOST = "127.0.0.1"
PROGRAM = """
import os, time
from pd_engine.service.lifeline import Lifeline
line = Lifeline("127.0.0.1")
folder = "/proc/self/fd/"
own = [os.readlink(folder + fd) for fd in os.listdir(folder) if os.path.lexists(folder + fd)]
print(line.port, sum(one.startswith("socket:") for one in own), flush=True)
time.sleep(1000)
"""


def opened() -> Lifeline:
    line = Lifeline(HOST)
    if line.port == 0:
        line.close()
        pytest.skip("unshare(CLONE_FILES) is not allowed here")
    return line


def connected(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=60)


def has_ended(connection: socket.socket) -> bool:
    """Waits for it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_ends_with_a_killed_process_that_does_not_have_it_among_its_files() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port, num_sockets = map(int, process.stdout.readline().split())
        if port == 0:
            process.kill()
            pytest.skip("unshare(CLONE_FILES) is not allowed here")
        assert num_sockets == 0, "the memory of the process would have to go first"
        with connected(port) as connection:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            connection.settimeout(60)
            os.kill(process.pid, signal.SIGKILL)
            assert has_ended(connection)


def test_closing_it_ends_all_connections_and_leaves_nothing() -> None:
    before, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    line = opened()
    with connected(line.port) as one, connected(line.port) as other:
        line.close()
        assert has_ended(one) and has_ended(other)
        with pytest.raises(ConnectionRefusedError):
            connected(line.port)
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)


def test_who_speaks_or_goes_changes_nothing_for_others() -> None:
    line = opened()
    with connected(line.port) as first, connected(line.port) as last:
        first.sendall(b"hello")
        for _ in range(100):
            connected(line.port).close()
        first.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.recv(1)
        first.settimeout(60)
        line.close()
        assert has_ended(first) and has_ended(last)


def test_where_a_thread_may_have_no_files_of_its_own_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "CLONE_FILES", 0xFFFF_FFFF)  # no such thing: refused
    before = set(os.listdir("/proc/self/fd"))
    line = Lifeline(HOST)
    assert line.port == 0
    line.close()
    assert set(os.listdir("/proc/self/fd")) == before
