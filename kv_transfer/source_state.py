"""The states of a source's handoff. Pure.

    PUBLISHING --close--> CLOSED --commit--> COMMITTED
    either     --release, fail, expire, supersede--> RELEASED, FAILED, EXPIRED, SUPERSEDED

Pins last exactly as long as PUBLISHING and CLOSED.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import Closing, Failed, Records

MARGIN_S = 1.0  # a source frees only this long after its destination's deadline


class SourceState(Enum):
    PUBLISHING = "publishing"
    CLOSED = "closed"          # all is published; the destination may still be fetching
    COMMITTED = "committed"    # the destination has everything that it needs
    RELEASED = "released"      # the router ended it
    FAILED = "failed"          # the worker gave up
    EXPIRED = "expired"        # nobody renewed it
    SUPERSEDED = "superseded"  # a higher attempt of the journey has begun


class SourceEnd(Enum):
    """Why a handoff's pins ended: the states after which nothing follows."""

    COMMITTED = SourceState.COMMITTED.value
    RELEASED = SourceState.RELEASED.value
    FAILED = SourceState.FAILED.value
    EXPIRED = SourceState.EXPIRED.value
    SUPERSEDED = SourceState.SUPERSEDED.value


class SourceEvent(Enum):
    CLOSE = "close"
    COMMIT = "commit"
    RELEASE = "release"
    FAIL = "fail"
    EXPIRE = "expire"
    SUPERSEDE = "supersede"


_ENDINGS = {
    SourceEvent.RELEASE: SourceState.RELEASED,
    SourceEvent.FAIL: SourceState.FAILED,
    SourceEvent.EXPIRE: SourceState.EXPIRED,
    SourceEvent.SUPERSEDE: SourceState.SUPERSEDED,
}

TRANSITIONS: dict[SourceState, dict[SourceEvent, SourceState]] = {
    SourceState.PUBLISHING: {SourceEvent.CLOSE: SourceState.CLOSED, **_ENDINGS},
    SourceState.CLOSED: {SourceEvent.COMMIT: SourceState.COMMITTED, **_ENDINGS},
    SourceState.COMMITTED: {},
    SourceState.RELEASED: {},
    SourceState.FAILED: {},
    SourceState.EXPIRED: {},
    SourceState.SUPERSEDED: {},
}


@dataclass(kw_only=True, slots=True, eq=False)
class SourceHandoff:
    """One handoff; `SourceBook` alone changes it.

    Attributes:
        block_ids: the sequence's blocks that cover its tokens, in order.
        generations: of each of them, when the pins began.
        records: what has been announced, in order.
        puller_epoch: the life of the only destination that may pull it; None until it asks.
        last_deadline_s: pins never outlive it, whoever renews them; infinite for the handoff of a prompt.
        readable: the blocks that its token opens.
    """

    key: JourneyKey
    token: str
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: int
    num_held_blocks: int
    deadline_s: float
    last_deadline_s: float = math.inf
    state: SourceState = SourceState.PUBLISHING
    records: list[Records] = field(default_factory=list)
    closing: Closing | None = None
    failed: Failed | None = None
    puller_epoch: str | None = None
    readable: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.readable = frozenset(self.block_ids[self.num_held_blocks :])

    @property
    def is_live(self) -> bool:
        return self.state in (SourceState.PUBLISHING, SourceState.CLOSED)

    def apply(self, event: SourceEvent) -> None:
        following = TRANSITIONS[self.state].get(event)
        assert following is not None, f"{self.key}: {event.value} is not possible in state {self.state.value}"
        self.state = following
