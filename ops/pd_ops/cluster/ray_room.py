"""Whether there is room for processes, before they are asked for: Ray would wait in silence, a full host would fall."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from pd_engine.errors import ResourceExhausted
from pd_ops.cluster.host_room import HostRoom, lacking
from pd_ops.cluster.members import Member
from pd_ops.cluster.operations import Fleet
from pd_ops.cluster.plan import POOL_LABEL, ActorPlan, ClusterPlan, Role, check_placeable

MEMORY_RESERVE = 0.05  # of the host's, that new workers leave alone
POLL_S = 0.25
ray: Any = importlib.import_module("ray")  # Any: it is typed in parts only


def check_resources(plan: ClusterPlan) -> None:
    """Refuses a plan for which a joined Ray has no host or not enough free CPUs.

    Raises:
        InvalidArgument: labels or a node that no host has.
        ResourceExhausted: too few free CPUs.
    """
    check_placeable(plan, {host.node_id: host.labels for host in live_hosts()})
    _check_cpus(plan.actors)


async def wait_for_hosts(
    actors: Sequence[ActorPlan], timeout_s: float, tell: Callable[[str], None] = lambda sentence: None
) -> None:
    """Until hosts with room for all of these have joined Ray: they boot one after the other.

    Raises:
        ResourceExhausted: they have not in time.
    """
    deadline_s, told = time.monotonic() + timeout_s, ""
    while sentences := lacking(actors, live_hosts()):
        text = "; ".join(sentences)
        if time.monotonic() > deadline_s:
            raise ResourceExhausted(f"{text}; waited for {timeout_s:g} s (cluster.start_timeout_s)")
        if text != told:
            tell(f"waiting for hosts: {text}")
            told = text
        await asyncio.sleep(POLL_S)


def check_room(fleet: Fleet, roles: Sequence[Role], *, is_local: bool) -> None:
    """Of further workers, one for each of these roles.

    Args:
        is_local: all of them will be on this host, in a Ray that counts no CPUs.

    Raises:
        ResourceExhausted: too little memory, if they take what the largest of their pool takes; or too few CPUs.
    """
    if not is_local:
        _check_cpus([fleet.plan.another(role, ()) for role in roles])
        return
    needed = sum(max((_resident_bytes(one) for one in fleet.workers if one.role is role), default=0) for role in roles)
    memory = psutil.virtual_memory()
    spare = memory.available - round(MEMORY_RESERVE * memory.total)
    if needed > spare:
        raise ResourceExhausted(
            f"{len(roles)} workers more would take about {needed >> 20} MiB, as the others do; this host has "
            f"{max(0, spare) >> 20} MiB to spare"
        )


def live_hosts() -> list[HostRoom]:
    """Of Ray, with the CPUs that are free there now."""
    free = ray._private.state.available_resources_per_node()
    return [
        HostRoom(
            address=node["NodeManagerAddress"], node_id=node["NodeID"], labels=node["Labels"],
            num_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
        )
        for node in ray.nodes() if node["Alive"]
    ]


def host_documents() -> list[dict[str, Any]]:
    """The live hosts of all pools, as `pd-relay status` shows them."""
    return [
        {"address": host.address, "pool": host.labels[POOL_LABEL], "free_cpus": host.num_cpus}
        for host in live_hosts() if POOL_LABEL in host.labels
    ]


def _check_cpus(actors: Sequence[ActorPlan]) -> None:
    if sentences := lacking(actors, live_hosts()):
        raise ResourceExhausted("; ".join(sentences))


def _resident_bytes(member: Member) -> int:
    try:
        return int(psutil.Process(member.started.pid).memory_info().rss) if member.started is not None else 0
    except psutil.NoSuchProcess:
        return 0
