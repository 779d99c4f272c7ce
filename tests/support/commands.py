"""Runs `pd-relay` as a user does: in a process of its own. Most are forked, as Python takes a second to start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_ops.cli import run
from support.fork_server import start_fork_server

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
    with tempfile.TemporaryDirectory(prefix="pd-relay-command-") as name:
        folder = Path(name)
        (folder / "0").write_bytes(stdin)
        words = [os.fsdecode(argument) for argument in arguments]
        process = start_fork_server().Process(target=_run, args=(words, environment(**more), os.getcwd(), folder))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"{words} did not end within {timeout_s} s: {(folder / '2').read_text()}")
        code = process.exitcode
        process.close()
        return Finished(code=code, stdout=(folder / "1").read_text(), stderr=(folder / "2").read_text())


def _run(words: list[str], variables: dict[str, str], directory: str, folder: Path) -> None:
    """In the forked process: as if Python had been started with standard files in `folder`, named by number."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    for number in range(3):
        opened = os.open(folder / str(number), os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.argv = ["pd-relay", *words]
    sys.exit(run(words))


def run_anew(*arguments: str | bytes | Path, timeout_s: float = TIMEOUT_S, **more: str) -> Finished:
    """As `run_command`, in a Python that is started for it: for what starts a cluster of its own."""
    result = subprocess.run(
        [*COMMAND, *arguments], env=environment(**more), stdin=subprocess.DEVNULL, capture_output=True,
        timeout=timeout_s, check=False,
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
