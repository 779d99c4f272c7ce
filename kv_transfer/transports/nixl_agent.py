"""What the nixl transport needs of NIXL, and where it is found: an extra, imported only when it is asked for."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from pd_engine.errors import FailedPrecondition

MODULES = ("nixl_cu13._api", "nixl_cu12._api")  # one of the two is installed; neither needs CUDA for host memory
BACKEND = "UCX"
MEMORY = "DRAM"
DONE, IN_PROGRESS = "DONE", "PROC"

Regions = npt.NDArray[np.uint64]
"""[n, 3]: address, length in bytes, device (0 for host memory)."""


class NixlAgent(Protocol):
    """One NIXL agent, used from one thread. Registrations, descriptors and handles are its own objects."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any: ...

    def deregister_memory(self, dereg_list: Any) -> None: ...

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...

    def get_xfer_descs(self, descs: Regions, mem_type: str) -> Any: ...

    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str | bytes
    ) -> Any: ...

    def transfer(self, handle: Any) -> str:
        """DONE, PROC or ERR; raises where the peer is gone."""

    def check_xfer_state(self, handle: Any) -> str:
        """As `transfer`, and lets the transfer go on."""

    def release_xfer_handle(self, handle: Any) -> None: ...

    def update_notifs(self) -> object:
        """Lets whatever peers want of this agent go on."""


MakeAgent = Callable[[str], NixlAgent]


def make_nixl_agent(name: str) -> NixlAgent:
    """A real one, over UCX. Without a progress thread of its own: that one would keep a core busy while nothing moves.

    Raises:
        FailedPrecondition: NIXL is not installed, or has no UCX here.
    """
    for module in MODULES:
        try:
            api = importlib.import_module(module)
        except ImportError:
            continue
        _log_to_standard_error()
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
        if BACKEND not in agent.backends:
            raise FailedPrecondition(f"transport nixl needs NIXL's backend {BACKEND}; it has {agent.get_plugin_list()}")
        return cast(NixlAgent, agent)
    raise FailedPrecondition("transport nixl needs the extra: pip install 'pd-relay[nixl]'")


def _log_to_standard_error() -> None:
    """Its logger writes to standard output, which belongs to results."""
    for handler in logging.getLogger("nixl").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
