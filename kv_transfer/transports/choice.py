"""Which transports a worker offers under a setting: one by name, or what its host can do, best first. Pure but for
`host_facts`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.transports.nixl_agent import MODULES

TRANSPORT_NAMES = ("shared_memory", "nixl", "nccl", "tcp")
RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Attributes:
    has_nixl: NIXL is installed.
    num_rdma_devices: network adapters whose memory access NIXL can use.
    """

    has_nixl: bool
    num_rdma_devices: int


def host_facts() -> HostFacts:
    """Of this host, without importing or opening anything."""
    packages = [module.split(".", maxsplit=1)[0] for module in MODULES]
    return HostFacts(
        has_nixl=any(importlib.util.find_spec(package) is not None for package in packages),
        num_rdma_devices=len(list(RDMA_DEVICES.iterdir())) if RDMA_DEVICES.is_dir() else 0,
    )


def transport_names(setting: str, facts: HostFacts) -> tuple[str, ...]:
    """What the setting allows, best first. Of `auto`: shared memory reaches workers of the same host only, and is the
    fastest to them; NIXL is worth it where there is RDMA (over TCP it is slower than the plain one); tcp always works.
    `nccl` moves memory of GPUs and is never chosen for arenas in host memory."""
    if setting != "auto":
        return (setting,)
    return ("shared_memory", *(["nixl"] if facts.has_nixl and facts.num_rdma_devices else []), "tcp")


def why(setting: str, facts: HostFacts) -> str:
    """The choice in words, for the log."""
    names = ", ".join(transport_names(setting, facts))
    if setting != "auto":
        return f"transports: {names}, as set"
    nixl = "nixl is installed" if facts.has_nixl else "nixl is not installed"
    return f"transports: {names} (auto; arenas in host memory, {nixl}, {facts.num_rdma_devices} RDMA devices)"
