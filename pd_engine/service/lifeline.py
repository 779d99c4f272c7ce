"""Connections that end at once when this process is killed.

The kernel takes a killed process's memory back before it closes its files: connections of a worker with much of it stay
open meanwhile, for seconds. What threads have for themselves goes when they end, which is at once. So a thread here has
a table of open files of its own, and in it a port: who is connected there, and says nothing, hears of the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import socket
import threading

MAX_HELD = 256  # further ones wait to be accepted; they hear of the end too
BACKLOG = 64
CLONE_FILES = 0x400
STANDARD_FILES = (0, 1, 2)

log = logging.getLogger(__name__)


class Lifeline:
    """A port on `host`, any free one.

    Attributes:
        port: 0: there is none, because this process may not have separate tables of files (containers may forbid it).
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        woken, self._waker = os.pipe()
        with socket.create_server((host, 0), family=family, backlog=BACKLOG) as listener:
            self.port = listener.getsockname()[1]
            has_own_files: list[bool] = []
            is_decided = threading.Event()
            self._thread = threading.Thread(
                target=_hold, args=(listener.fileno(), woken, has_own_files, is_decided), name="lifeline", daemon=True
            )
            self._thread.start()
            is_decided.wait()
        os.close(woken)  # as the listener: the thread has its own
        if not has_own_files:
            self.port = 0
            log.info("no lifeline: unshare(CLONE_FILES) is not allowed here")

    def close(self) -> None:
        """Ends the connections. To be called once."""
        os.close(self._waker)
        self._thread.join()


def _hold(listening: int, woken: int, has_own_files: list[bool], is_decided: threading.Event) -> None:
    """Until the other end of `woken` is closed. Numbers of files mean nothing outside of this thread."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_FILES) != 0:
            return
        _close_all_but({*STANDARD_FILES, listening, woken})
        has_own_files.append(True)
    finally:
        is_decided.set()
    listener = socket.socket(fileno=listening)
    try:
        _accept(listener, woken)
    finally:
        listener.detach()  # all of the table goes with the thread


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/thread-self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


def _accept(listener: socket.socket, woken: int) -> None:
    held: set[int] = set()
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == woken:
                return
            if fd in held:  # its peer has gone, or speaks where nothing is to be said
                poll.unregister(fd)
                os.close(fd)
                held.discard(fd)
            else:
                with contextlib.suppress(OSError):  # a peer that has gone meanwhile
                    connection, _ = listener.accept()
                    held.add(connection.fileno())
                    poll.register(connection.detach(), select.POLLIN)
            if len(held) < MAX_HELD:
                poll.register(listener, select.POLLIN)
            else:
                poll.register(listener, 0)
