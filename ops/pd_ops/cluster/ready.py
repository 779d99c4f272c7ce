"""Processes that serve, as `serve` tells of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pd_ops.cluster.actors import RouterStarted, WorkerStarted
from pd_ops.cluster.members import Member
from pd_ops.cluster.plan import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyWorker:
    """A worker that serves. `epoch` names this life of its process."""

    worker_id: str
    role: Role
    pid: int
    address: str
    epoch: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyCluster:
    """A cluster that serves."""

    router: RouterStarted
    workers: tuple[ReadyWorker, ...]


def ready_worker(member: Member) -> ReadyWorker:
    started = member.started
    assert isinstance(started, WorkerStarted), member
    return ReadyWorker(
        worker_id=member.actor_id, role=member.role, pid=started.pid, address=started.address, epoch=started.epoch
    )


def life_details(member: Member) -> dict[str, Any]:
    """For an event."""
    started = member.started
    assert started is not None, member
    details: dict[str, Any] = {"role": member.role.value, "pid": started.pid, "num_restarts": member.num_restarts}
    if isinstance(started, WorkerStarted):
        details |= {"address": started.address, "epoch": started.epoch}
    return details
