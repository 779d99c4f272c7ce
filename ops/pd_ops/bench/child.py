"""A measured process as its parent sees it: started, asked, ended; nothing of it outlives the bench."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence

from pd_engine.errors import Unavailable
from pd_ops.bench.measured_process import Document

START_TIMEOUT_S = 1800.0  # vLLM compiles
CALL_TIMEOUT_S = 900.0
END_TIMEOUT_S = 5.0
LOG_TAIL_CHARS = 600


class Child:
    """Started by the constructor; `ready` waits for it.

    Args:
        command: what to run; it answers as `measured_process.serve` does.
        threads: of its compute libraries.
    """

    def __init__(self, name: str, command: Sequence[str], *, threads: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed in `close`
        threads_text = str(threads)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            start_new_session=True,  # a Ctrl-C is for the bench alone, which then ends its children
            env={
                **os.environ, "OMP_NUM_THREADS": threads_text, "MKL_NUM_THREADS": threads_text,
                "OPENBLAS_NUM_THREADS": threads_text, "TOKENIZERS_PARALLELISM": "false",
            },
        )

    def ready(self) -> Document:
        """What it says of itself once it has loaded.

        Raises:
            Unavailable: it could not load.
        """
        document: Document = self._receive(START_TIMEOUT_S)["ready"]
        return document

    def ask(self, request: Document) -> Document:
        """Raises:
        Unavailable: it failed; with what it said. It may be asked again unless it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise Unavailable(f"{self.name} has ended: {self._log_tail()}") from None
        return self._receive(CALL_TIMEOUT_S)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends it, and everything that it has started. Safe to call twice."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended with a request unread
            process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            self._log.close()

    def _receive(self, timeout_s: float) -> Document:
        assert self._process.stdout is not None
        alarm = threading.Timer(timeout_s, self._process.kill)
        alarm.daemon = True
        try:
            alarm.start()  # a Ctrl-C may come even here
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise Unavailable(f"{self.name} has ended, or said nothing for {timeout_s:.0f} s: {self._log_tail()}")
        document: Document = json.loads(line)
        if "error" in document:
            raise Unavailable(f"{self.name}: {document['error']}")
        return document

    def _log_tail(self) -> str:
        if self._log.closed:
            return "no log"
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL_CHARS, max(0, size - LOG_TAIL_CHARS))
        return " ".join(tail.decode("utf-8", errors="replace").split()) or "it printed nothing"
