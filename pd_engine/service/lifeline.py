"""Connections that end at once when this process is killed.

The kernel takes a killed process's memory back before it closes its files: connections of a worker with much of it stay
open meanwhile, for seconds. What threads have for themselves goes when they end, which is at once. So a thread here has
a table of open files of its own, and in it a port: who is connected there hears of the end.

Nobody is accepted. The kernel holds the connections, and the thread waits in one call: what Python might do in a thread
that runs, such as closing a file that another thread left as garbage, would be done to the wrong table.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading

MAX_HELD = 1024  # connections, ended ones too; more are not let in
CLONE_FILES = 0x400
STANDARD_FILES = (0, 1, 2)

log = logging.getLogger(__name__)


class Lifeline:
    """A port on `host`, any free one.

    Attributes:
        port: 0: there is none, because this process may not have separate tables of files (containers may forbid it).
    """

    def __init__(self, host: str) -> None:
        """Raises:
        OSError, RuntimeError: this process may have no more files, or threads.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        has_own_files: list[bool] = []
        is_decided = threading.Event()
        with socket.create_server((host, 0), family=family, backlog=MAX_HELD) as listener:
            self.port = listener.getsockname()[1]
            woken, self._waker = os.pipe()
            self._thread = threading.Thread(
                target=_hold, args=(listener.fileno(), woken, has_own_files, is_decided), name="lifeline", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:
                os.close(self._waker)
                raise
            else:
                is_decided.wait()
            finally:
                os.close(woken)  # as the listener: the thread has its own
        if not has_own_files:
            self.port = 0
            log.warning("no lifeline: unshare(CLONE_FILES) is not allowed here")

    def close(self) -> None:
        """Ends the connections. To be called once."""
        os.close(self._waker)
        self._thread.join()


def _hold(listening: int, woken: int, has_own_files: list[bool], is_decided: threading.Event) -> None:
    """Until the other end of `woken` is closed; then all of the table goes with the thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # to wake the loop takes a file that is not here
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_FILES) != 0:
            return
        _close_all_but({*STANDARD_FILES, listening, woken})
        has_own_files.append(True)
    finally:
        is_decided.set()
    os.read(woken, 1)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/thread-self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))
