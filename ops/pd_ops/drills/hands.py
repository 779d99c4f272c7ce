"""What breaks processes and hosts, from outside of the cluster, and mends them."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
from enum import Enum
from typing import Protocol

from pd_engine.errors import FailedPrecondition
from pd_ops.launcher.cluster_file import ClusterFile

HAND_TIMEOUT_S = 60.0


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

    async def signal(self, host: str, pid: int, number: signal.Signals) -> None:
        """To a process on a host."""

    async def do(self, fault: HostFault, host: str) -> None: ...


class LocalHands:
    """For a cluster on this host."""

    def check(self, *faults: HostFault) -> None:
        if faults:
            raise FailedPrecondition(
                "this drill breaks a host, and this cluster has one: name a launcher file with --hosts"
            )

    async def signal(self, host: str, pid: int, number: signal.Signals) -> None:
        os.kill(pid, number)

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

    async def signal(self, host: str, pid: int, number: signal.Signals) -> None:
        await asyncio.to_thread(self._file.shell.run, host, f"kill -{number.value} {pid}")

    async def do(self, fault: HostFault, host: str) -> None:
        self.check(fault)
        command = [part.replace("{host}", host) for part in shlex.split(self._file.hands[fault.value])]
        await asyncio.to_thread(_run, command, fault, host)


def _run(command: list[str], fault: HostFault, host: str) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FailedPrecondition(f"{host}: {fault.value} could not be done: {error}") from None
    if done.returncode != 0:
        raise FailedPrecondition(f"{host}: {fault.value} failed: {(done.stderr or done.stdout).strip()[-400:]}")
