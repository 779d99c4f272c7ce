"""Which workers there are, and what may become of the connection to one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """Where a worker is to be found; `role` is "prefill" or "decode", `address` is "host:port".

    `is_expected` is False for one that takes nothing new and that nobody waits for: it drains, or its process has ended
    and none is started in its place.
    """

    worker_id: str
    role: str
    address: str
    is_expected: bool = True

    def is_same_place(self, other: WorkerEndpoint) -> bool:
        return (self.worker_id, self.role, self.address) == (other.worker_id, other.role, other.address)


class LinkState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


TRANSITIONS: dict[LinkState, frozenset[LinkState]] = {
    LinkState.STARTING: frozenset({LinkState.READY, LinkState.DRAINING, LinkState.LOST, LinkState.REFUSED}),
    LinkState.READY: frozenset({LinkState.DRAINING, LinkState.LOST}),
    LinkState.DRAINING: frozenset({LinkState.READY, LinkState.LOST}),
    LinkState.LOST: frozenset({LinkState.READY, LinkState.DRAINING, LinkState.REFUSED}),
    LinkState.REFUSED: frozenset({LinkState.READY, LinkState.DRAINING, LinkState.LOST}),
}
