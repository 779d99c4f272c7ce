"""What breaks processes and hosts, from outside of the cluster, and mends them."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
from enum import Enum
from typing import Protocol

from pd_engine.errors import FailedPrecondition, Unavailable
from pd_ops.launcher.cluster_file import ClusterFile

HAND_TIMEOUT_S = 60.0
READY = "pd-relay-is-ready"
MAX_SHOWN = 400


class HostFault(Enum):
    """What can be done to a host; each has its command in `provider.hands` of the launcher file."""

    KILL = "kill"  # at once, as if its plug were pulled
    BOOT = "boot"  # one that was killed; returns when commands reach it
    CUT = "cut"    # from the network
    HEAL = "heal"
    SLOW = "slow"  # its network
    FAST = "fast"


class Hands(Protocol):
    def check(self, *faults: HostFault) -> None:
        """Raises:
        FailedPrecondition: one of these cannot be done.
        """

    async def signal(self, host: str, pid: int, number: signal.Signals) -> float:
        """To a process on a host. When it was sent, on this process's monotonic clock: the way there is not counted.

        Raises:
            Unavailable: the host is not reached.
            FailedPrecondition: there is no such process.
        """

    async def do(self, fault: HostFault, host: str) -> None: ...


class LocalHands:
    """For a cluster on this host."""

    def check(self, *faults: HostFault) -> None:
        if faults:
            raise FailedPrecondition(
                "this drill breaks a host, and this cluster has one: name a launcher file with --hosts"
            )

    async def signal(self, host: str, pid: int, number: signal.Signals) -> float:
        at_s = time.monotonic()
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise FailedPrecondition(f"process {pid} has ended by itself before the drill got to it") from None
        return at_s

    async def do(self, fault: HostFault, host: str) -> None:
        self.check(fault)


class HostHands:
    """For the hosts of a launcher file: signals go through its shell, faults are commands that it names."""

    def __init__(self, file: ClusterFile) -> None:
        self._file = file

    def check(self, *faults: HostFault) -> None:
        missing = [fault.value for fault in faults if fault.value not in self._file.hands]
        if missing:
            raise FailedPrecondition(f"{self._file.path}: provider.hands has no command for {', '.join(missing)}")

    async def signal(self, host: str, pid: int, number: signal.Signals) -> float:
        """A shell there says that it is ready, and sends the signal when it is told to."""
        process = await asyncio.create_subprocess_exec(
            *self._file.shell.argv(host, f"echo {READY}; read -r go; kill -{number.value} {pid}"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(HAND_TIMEOUT_S):
                return await _when_ready(process, host)
        except TimeoutError:
            raise Unavailable(f"{host} did not send a signal in {HAND_TIMEOUT_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()

    async def do(self, fault: HostFault, host: str) -> None:
        self.check(fault)
        command = [part.replace("{host}", host) for part in shlex.split(self._file.hands[fault.value])]
        await asyncio.to_thread(_run, command, fault, host)


async def _when_ready(process: asyncio.subprocess.Process, host: str) -> float:
    assert process.stdout is not None, "it is piped"
    while (line := await process.stdout.readline()) and line.strip() != READY.encode():
        pass  # a greeting
    at_s = time.monotonic()
    _, said = await process.communicate(b"\n")
    if not line:
        raise Unavailable(f"{host} is not reached: {_end(said)}")
    if process.returncode != 0:
        raise FailedPrecondition(f"{host}: the signal was not sent: {_end(said)}")
    return at_s


def _end(said: bytes) -> str:
    return said.decode(errors="replace").strip()[-MAX_SHOWN:]


def _run(command: list[str], fault: HostFault, host: str) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FailedPrecondition(f"{host}: {fault.value} could not be done: {error}") from None
    if done.returncode != 0:
        raise FailedPrecondition(f"{host}: {fault.value} failed: {(done.stderr or done.stdout).strip()[-MAX_SHOWN:]}")
