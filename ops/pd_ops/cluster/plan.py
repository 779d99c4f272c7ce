"""Which actors a cluster has and where each may run. Pure: no Ray, no process.

`serve` keeps everything on its own host; with other placements the same plan spreads the pools over many hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from pd_engine.errors import InvalidArgument
from pd_engine.settings import Settings


class Role(Enum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


WORKER_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the actors of one role may run: on hosts that carry all these Ray labels, and on one node if it is named.

    Attributes:
        label_selector: Ray labels, such as {"pool": "decode"}.
        node_id: Ray's hexadecimal id of a node, or None for any.
    """

    label_selector: Mapping[str, str] = field(default_factory=dict)
    node_id: str | None = None


def everywhere(placement: Placement) -> Mapping[Role, Placement]:
    """The same placement for every role."""
    return MappingProxyType(dict.fromkeys(Role, placement))


ANYWHERE = everywhere(Placement())

# Each role on the hosts of its own pool, as launcher files label them.
POOL_LABEL = "pool"
BY_POOL: Mapping[Role, Placement] = MappingProxyType(
    {role: Placement(label_selector=MappingProxyType({POOL_LABEL: role.value})) for role in Role}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorPlan:
    """One process. `actor_id` is unique in the cluster: "router", "prefill-0", "decode-1"."""

    actor_id: str
    role: Role
    num_cpus: int
    placement: Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    router: ActorPlan
    workers: tuple[ActorPlan, ...]

    @property
    def actors(self) -> tuple[ActorPlan, ...]:
        return (self.router, *self.workers)

    @property
    def num_cpus(self) -> int:
        """Logical CPUs that Ray must have for all of it."""
        return sum(actor.num_cpus for actor in self.actors)

    def size(self, role: Role) -> int:
        return sum(worker.role is role for worker in self.workers)

    def another(self, role: Role, taken: Iterable[str]) -> ActorPlan:
        """One worker more of that role, with the lowest number that nobody has; where and as large as the others."""
        known = set(taken)
        number = 0
        while (actor_id := f"{role.value}-{number}") in known:
            number += 1
        return self.named(role, actor_id)

    def named(self, role: Role, actor_id: str) -> ActorPlan:
        """A worker of that role, where and as large as the others."""
        example = next(worker for worker in self.workers if worker.role is role)
        return replace(example, actor_id=actor_id)


def plan_cluster(settings: Settings, placements: Mapping[Role, Placement] = ANYWHERE) -> ClusterPlan:
    """One router and both pools, in the order in which they are placed. A worker counts a CPU a compute thread."""
    counts = {Role.PREFILL: settings.prefill.workers, Role.DECODE: settings.decode.workers}
    return ClusterPlan(
        router=ActorPlan(actor_id="router", role=Role.ROUTER, num_cpus=1, placement=placements[Role.ROUTER]),
        workers=tuple(
            ActorPlan(
                actor_id=f"{role.value}-{index}", role=role, num_cpus=settings.engine.threads,
                placement=placements[role],
            )
            for role in WORKER_ROLES
            for index in range(counts[role])
        ),
    )


def check_placeable(plan: ClusterPlan, node_labels: Mapping[str, Mapping[str, str]]) -> None:
    """Refuses what Ray would wait for in silence, for ever.

    Args:
        node_labels: Ray labels of every live node, by node id.

    Raises:
        InvalidArgument: no node fits an actor; the message names the actor and what it asked for.
    """
    for actor in plan.actors:
        placement = actor.placement
        if placement.node_id is not None and placement.node_id not in node_labels:
            raise InvalidArgument(f"{actor.actor_id} is bound to node {placement.node_id}, which is not in the cluster")
        candidates = [placement.node_id] if placement.node_id is not None else list(node_labels)
        wanted = placement.label_selector.items()
        if not any(wanted <= node_labels[node].items() for node in candidates):
            text = ", ".join(f"{name}={value}" for name, value in wanted)
            raise InvalidArgument(f"{actor.actor_id} must run where {text}, but no host of the cluster is labelled so")
