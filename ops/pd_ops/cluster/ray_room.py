"""Whether there is room for processes, before they are asked for: Ray would wait in silence, a full host would fall."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import psutil

from pd_engine.errors import ResourceExhausted
from pd_ops.cluster.members import Member
from pd_ops.cluster.operations import Fleet
from pd_ops.cluster.plan import ClusterPlan, Role, check_placeable

MEMORY_RESERVE = 0.05  # of the host's, that new workers leave alone
ray: Any = importlib.import_module("ray")  # Any: it is typed in parts only


def check_resources(plan: ClusterPlan) -> None:
    """Refuses a plan for which a joined Ray has no host or not enough free CPUs.

    Raises:
        InvalidArgument: labels or a node that no host has.
        ResourceExhausted: too few free CPUs.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    check_placeable(plan, {node["NodeID"]: node["Labels"] for node in nodes})
    _check_cpus(plan.num_cpus, "the cluster needs")


def check_room(fleet: Fleet, roles: Sequence[Role], *, is_local: bool) -> None:
    """Of further workers, one for each of these roles.

    Args:
        is_local: all of them will be on this host, in a Ray that counts no CPUs.

    Raises:
        ResourceExhausted: too little memory, if they take what the largest of their pool takes; or too few CPUs.
    """
    if not is_local:
        _check_cpus(len(roles) * fleet.settings.engine.threads, f"{len(roles)} workers more need")
        return
    needed = sum(max((_resident_bytes(one) for one in fleet.workers if one.role is role), default=0) for role in roles)
    memory = psutil.virtual_memory()
    spare = memory.available - round(MEMORY_RESERVE * memory.total)
    if needed > spare:
        raise ResourceExhausted(
            f"{len(roles)} workers more would take about {needed >> 20} MiB, as the others do; this host has "
            f"{max(0, spare) >> 20} MiB to spare"
        )


def _check_cpus(num_cpus: int, who: str) -> None:
    free = ray.available_resources().get("CPU", 0.0)
    if free < num_cpus:
        num_hosts = sum(1 for node in ray.nodes() if node["Alive"])
        raise ResourceExhausted(f"{who} {num_cpus} CPUs of Ray, which has {free:g} free on {num_hosts} hosts")


def _resident_bytes(member: Member) -> int:
    try:
        return int(psutil.Process(member.started.pid).memory_info().rss) if member.started is not None else 0
    except psutil.NoSuchProcess:
        return 0
