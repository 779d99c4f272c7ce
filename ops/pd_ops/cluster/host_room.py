"""Whether hosts have room for processes that may run at some of them only. Pure.

Ray waits for such hosts in silence, for ever: it is asked first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pd_ops.cluster.plan import ActorPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRoom:
    """A live host of Ray: its address, its labels, and CPUs of Ray that may be taken."""

    address: str
    node_id: str
    labels: Mapping[str, str]
    num_cpus: float


def lacking(actors: Iterable[ActorPlan], hosts: Sequence[HostRoom]) -> list[str]:
    """What there is no room for, a sentence a kind of host; empty if there is room for all."""
    wanted = Counter(
        (tuple(sorted(actor.placement.label_selector.items())), actor.placement.node_id, actor.num_cpus)
        for actor in actors
    )
    sentences = []
    for (labels, node_id, num_cpus), count in wanted.items():
        there = [host for host in hosts
                 if set(labels) <= set(host.labels.items()) and node_id in (None, host.node_id)]
        places = sum(int(host.num_cpus // num_cpus) for host in there)
        where = ", ".join(f"{name}={value}" for name, value in labels) or "any label"
        if not there:
            sentences.append(f"no host with {where} is in the cluster")
        elif places < count:
            sentences.append(
                f"{count} processes of {num_cpus} CPUs are to run on hosts with {where}, which have room for {places} "
                f"({', '.join(f'{host.address}: {host.num_cpus:g} CPUs' for host in there)})"
            )
    return sentences
