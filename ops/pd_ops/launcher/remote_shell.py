"""Runs commands on other hosts, through whatever gets there: ssh, or a program that the launcher file names."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pd_engine.errors import FailedPrecondition, InvalidArgument, Unavailable, shown

EXIT_UNREACHABLE = 255  # what ssh returns when it did not get there
EXIT_NO_COMMAND = 127  # what a shell returns for a program that is not there
REACH_TIMEOUT_S = 10.0
CHECKOUT = "~/pd-relay"  # on every host, as launcher files put it there
PYTHON = f"{CHECKOUT}/.venv/bin/python"
MAX_SHOWN_BYTES = 400
SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=4", "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3", "-o", "StrictHostKeyChecking=accept-new",
)
T = TypeVar("T")


class NoSuchCommand(FailedPrecondition):
    """A host is reached, and has not what was to run there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteShell:
    """Attributes:
    prefix: of a command line that runs its last argument in a shell of "{host}", with its standard input, output and
        exit code; it returns 255 if it does not get there.
    """

    prefix: tuple[str, ...]

    @staticmethod
    def of(provider: Mapping[str, Any], auth: Mapping[str, Any]) -> RemoteShell:
        """As a launcher file says: its provider's `shell`, or ssh with the user and the key of its `auth`.

        Raises:
            InvalidArgument: `shell` is no command line with {host} in it, or user or key is no text.
        """
        shell = provider.get("shell")
        if shell is not None:
            if not isinstance(shell, str) or "{host}" not in shell:
                raise InvalidArgument(f"provider.shell must be a command line with {{host}} in it, got {shown(shell)}")
            try:
                return RemoteShell(prefix=tuple(shlex.split(shell)))
            except ValueError as error:
                raise InvalidArgument(f"provider.shell is no command line ({error}): {shown(shell)}") from None
        key, user = auth.get("ssh_private_key"), auth.get("ssh_user")
        for name, value in (("ssh_private_key", key), ("ssh_user", user)):
            if value is not None and not isinstance(value, str):
                raise InvalidArgument(f"auth.{name} must be a text, got {shown(value)}")
        identity = ("-i", os.path.expanduser(key)) if key else ()
        return RemoteShell(prefix=(*SSH, *identity, f"{user}@{{host}}" if user else "{host}"))

    def argv(self, host: str, command: str) -> list[str]:
        return [*(part.replace("{host}", host) for part in self.prefix), command]

    def run(self, host: str, command: str, *, timeout_s: float = REACH_TIMEOUT_S, stdin: bytes = b"") -> str:
        """What it writes to standard output.

        Raises:
            Unavailable: the host is not reached, or the command does not end in time.
            NoSuchCommand: there is no such program.
            FailedPrecondition: the command failed there; the message has the end of what it said.
        """
        try:
            done = subprocess.run(
                self.argv(host, command), input=stdin, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{host} did not finish {_shown(command)} in {timeout_s:g} s") from None
        except OSError as error:
            raise FailedPrecondition(f"cannot run {self.prefix[0]}: {error.strerror}") from None
        if done.returncode == EXIT_UNREACHABLE:
            raise Unavailable(f"{host} is not reached: {_end(done.stderr) or 'no answer'}")
        if done.returncode != 0:
            said = _end(done.stderr) or _end(done.stdout)
            kind = NoSuchCommand if done.returncode == EXIT_NO_COMMAND else FailedPrecondition
            raise kind(f"{host}: {_shown(command)} failed with {done.returncode}: {said}")
        return done.stdout.decode(errors="replace")


def on_all(hosts: Sequence[str], work: Callable[[str], T]) -> dict[str, T | Unavailable | FailedPrecondition]:
    """`work` for every host at once: its result, or what it raised."""
    def one(host: str) -> T | Unavailable | FailedPrecondition:
        try:
            return work(host)
        except (Unavailable, FailedPrecondition) as error:
            return error

    if not hosts:
        return {}
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as threads:
        return dict(zip(hosts, threads.map(one, hosts), strict=True))


def _shown(command: str) -> str:
    return f"`{command[:77]}...`" if len(command) > 80 else f"`{command}`"


def _end(output: bytes) -> str:
    """In one line."""
    return "; ".join(output.decode(errors="replace").splitlines()).strip("; ")[-MAX_SHOWN_BYTES:]
