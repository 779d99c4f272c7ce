"""Runs `pd-relay` as a user does: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
COMMAND = (sys.executable, "-m", "pd_ops.cli")


@dataclass(frozen=True, kw_only=True)
class Finished:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on standard output."""
        [line] = self.stdout.splitlines()
        document: dict[str, Any] = json.loads(line)
        return document

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def run_command(
    *arguments: str | bytes | Path, timeout_s: float = TIMEOUT_S, stdin: bytes = b"", **more: str
) -> Finished:
    """Runs one command to its end; `more` is added to its environment."""
    result = subprocess.run(
        [*COMMAND, *arguments], env=environment(**more), input=stdin, capture_output=True, timeout=timeout_s,
        check=False,
    )
    return Finished(code=result.returncode, stdout=result.stdout.decode(), stderr=result.stderr.decode())


class Serving:
    """`pd-relay serve`, running, in a process group of its own."""

    def __init__(self, *arguments: str, state_directory: Path, log: Path) -> None:
        self._log = log.open("w+b")
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--json", *arguments], stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment(PD_RELAY_STATE_DIR=str(state_directory)), start_new_session=True,
        )

    def event(self) -> dict[str, Any]:
        """The next event that it prints; waits for it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"serve ended with {self.process.wait()}: {self.stderr()}"
        event: dict[str, Any] = json.loads(line)
        return event

    def rest(self) -> list[dict[str, Any]]:
        """All further events, until it ends."""
        assert self.process.stdout is not None
        events = [json.loads(line) for line in self.process.stdout]
        self.process.wait()
        return events

    def signal_group(self, number: signal.Signals) -> None:
        """What a terminal does at Ctrl-C: every process of the group gets it."""
        os.killpg(self.process.pid, number)

    def stderr(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()

    def close(self) -> None:
        """For a test that failed: nothing stays."""
        self.process.kill()
        self.process.wait()
        self._log.close()
