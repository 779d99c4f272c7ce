"""The processes of a cluster as its controller knows them: what state each is in, and what may become of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from pd_ops.cluster.plan import ActorPlan, Role
from pd_ops.cluster.restarts import RestartPacer

if TYPE_CHECKING:
    from pd_engine.settings import Settings
    from pd_ops.cluster.actors import RouterStarted, WorkerStarted
    from pd_ops.cluster.placed_actor import PlacedActor


class MemberState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting"    # has ended, and is started again when its time has come
    DRAINING = "draining"  # takes nothing new, and ends
    ENDED = "ended"


TRANSITIONS: dict[MemberState, frozenset[MemberState]] = {
    MemberState.STARTING: frozenset({MemberState.SERVING, MemberState.WAITING, MemberState.ENDED}),
    MemberState.SERVING: frozenset({MemberState.WAITING, MemberState.DRAINING, MemberState.ENDED}),
    MemberState.WAITING: frozenset({MemberState.STARTING, MemberState.ENDED}),
    MemberState.DRAINING: frozenset({MemberState.ENDED}),
    MemberState.ENDED: frozenset(),
}


@dataclass(kw_only=True)
class Member:
    """One process, life after life.

    Attributes:
        settings: of every life: what has served with them is started again with them.
        actor: of its present or last life; None before the first.
        started: what that life said of itself; None before it serves.
        num_restarts: lives after the first.
        last_end: why the life before ended; empty if none has.
    """

    plan: ActorPlan
    settings: Settings
    pacer: RestartPacer
    state: MemberState = MemberState.STARTING
    actor: PlacedActor | None = None
    started: WorkerStarted | RouterStarted | None = None
    num_restarts: int = 0
    last_end: str = ""

    @property
    def actor_id(self) -> str:
        return self.plan.actor_id

    @property
    def role(self) -> Role:
        return self.plan.role

    @property
    def is_expected(self) -> bool:
        """Whether requests may be sent there, now or soon."""
        is_back_soon = self.state in (MemberState.STARTING, MemberState.WAITING) and self.pacer.is_hopeful
        return self.state is MemberState.SERVING or is_back_soon

    @property
    def address(self) -> str | None:
        """Where the present or last life is called: of a router, its gRPC door; None before the first serves."""
        return None if self.started is None else self.started.address

    def move(self, state: MemberState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.actor_id}: {self.state.value} -> {state.value}"
        self.state = state

    def to_json(self) -> dict[str, Any]:
        """As `pd-relay status` shows it."""
        return {
            "id": self.actor_id, "role": self.role.value, "state": self.state.value,
            "pid": self.started.pid if self.started is not None else None, "restarts": self.num_restarts,
            "last_end": self.last_end or None, "address": self.address,
        }
