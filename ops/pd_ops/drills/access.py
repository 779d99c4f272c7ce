"""How a drill gets at a cluster, on this host or on those of a launcher file: its controller, what can be broken."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from pd_engine.errors import InvalidArgument, Unavailable, from_code
from pd_ops.cluster.control_client import ask_controller
from pd_ops.cluster.control_messages import Request
from pd_ops.drills.hands import Hands, HostHands, LocalHands
from pd_ops.launcher.cluster_file import ClusterFile
from pd_ops.launcher.remote_shell import PYTHON

Note = Callable[[str], None]
ASK_TIMEOUT_S = 3700.0
BRIDGE = f"{PYTHON} -m pd_ops.cluster.control_bridge"


class Access(Protocol):
    """Attributes:
    hands: for what is to be broken.
    head: the host of the controller; None: this one.
    """

    hands: Hands
    head: str | None

    async def ask(self, request: Request, note: Note) -> dict[str, Any]:
        """The controller's answer. Raises as `ask_controller`."""

    async def start_head(self, note: Note) -> None:
        """Ray and the controller, on a head that has booted."""


class LocalAccess:
    """A cluster of this host, by its name."""

    def __init__(self, cluster: str) -> None:
        self.hands: Hands = LocalHands()
        self.head: str | None = None
        self._cluster = cluster

    async def ask(self, request: Request, note: Note) -> dict[str, Any]:
        return await ask_controller(self._cluster, request, note)

    async def start_head(self, note: Note) -> None:
        raise InvalidArgument("a cluster of one host has no head of its own")


class HostsAccess:
    """A cluster of a launcher file, from any host that reaches its hosts."""

    def __init__(self, file: ClusterFile, cluster: str, recovery_s: float) -> None:
        if file.head_host is None:
            raise InvalidArgument(f"{file.path}: drills need a provider of named hosts")
        self.hands: Hands = HostHands(file)
        self.head: str | None = file.head_host
        self._file = file
        self._cluster = cluster
        self._recovery_s = recovery_s

    async def ask(self, request: Request, note: Note) -> dict[str, Any]:
        command = f"{BRIDGE} {shlex.quote(self._cluster)} {shlex.quote(request.model_dump_json())}"
        run = partial(self._file.shell.run, timeout_s=ASK_TIMEOUT_S)
        lines = (await asyncio.to_thread(run, str(self.head), command)).splitlines()
        if not lines:
            raise Unavailable(f"the controller on {self.head} did not answer")
        reply = json.loads(lines[-1])
        if "error" in reply:
            raise from_code(reply["error"]["code"], reply["error"]["message"])
        result: dict[str, Any] = reply["result"]
        return result

    async def start_head(self, note: Note) -> None:
        from pd_ops.launcher.launch import bring_up  # imports Ray

        await asyncio.to_thread(bring_up, self._file, self._recovery_s, note)
