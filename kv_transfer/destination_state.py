"""The states of a destination's lease, and what a state machine tells its shell. Pure.

    RESERVED --pull--> PULLING --commit--> COMMITTED      the blocks are the worker's
    RESERVED --keep--> KEPT                               so they are: it computes the prompt itself
                       PULLING --finish--> FINISHED       the first token ended the request: nobody needs them
                       PULLING --break--> BROKEN          the lease waits for the router's next attempt
    any of the first, PULLING and BROKEN --release, expire, take_over--> RELEASED, EXPIRED, TAKEN_OVER
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.journey import JourneyKey, SourceInfo
from kv_transfer.manifest import Closing
from kv_transfer.pieces import Batch, PieceTable
from pd_engine.errors import PdRelayError


class LeaseState(Enum):
    RESERVED = "reserved"
    PULLING = "pulling"
    BROKEN = "broken"
    COMMITTED = "committed"
    KEPT = "kept"
    FINISHED = "finished"
    RELEASED = "released"
    EXPIRED = "expired"
    TAKEN_OVER = "taken_over"


class LeaseEvent(Enum):
    PULL = "pull"
    BREAK = "break"
    COMMIT = "commit"
    KEEP = "keep"
    FINISH = "finish"
    RELEASE = "release"
    EXPIRE = "expire"
    TAKE_OVER = "take_over"


_ENDINGS = {
    LeaseEvent.RELEASE: LeaseState.RELEASED,
    LeaseEvent.EXPIRE: LeaseState.EXPIRED,
    LeaseEvent.TAKE_OVER: LeaseState.TAKEN_OVER,
}

TRANSITIONS: dict[LeaseState, dict[LeaseEvent, LeaseState]] = {
    LeaseState.RESERVED: {LeaseEvent.PULL: LeaseState.PULLING, LeaseEvent.KEEP: LeaseState.KEPT, **_ENDINGS},
    LeaseState.PULLING: {
        LeaseEvent.COMMIT: LeaseState.COMMITTED, LeaseEvent.FINISH: LeaseState.FINISHED,
        LeaseEvent.BREAK: LeaseState.BROKEN, **_ENDINGS,
    },
    LeaseState.BROKEN: _ENDINGS,
    LeaseState.COMMITTED: {},
    LeaseState.KEPT: {},
    LeaseState.FINISHED: {},
    LeaseState.RELEASED: {},
    LeaseState.EXPIRED: {},
    LeaseState.TAKEN_OVER: {},
}


@dataclass(kw_only=True, slots=True, eq=False)
class LeaseRecord:
    """One lease; `DestinationBook` alone changes it.

    Attributes:
        num_tokens: prompt tokens that are handed over.
        num_prompt_blocks: blocks that these cover.
        num_held_blocks: leading blocks that are not fetched.
        block_ids: of the whole sequence in order, the held ones first.
        deadline_s: when the lease expires.
        peer_deadline_s: when a source that says nothing counts as stalled.
        next_renewal_s: when the source is to be asked again.
        pieces: None until the manifest has opened.
        fetches: batches in flight, by number.
        may_have_pieces: something may be fetchable.
        pulling_s, closed_s: when its pull began, and when its source said that the prompt was computed.
        transport: its name, once connected.
        num_hidden_bytes: verified when the closing part came, while the prompt was still being computed.
        is_prefix: of cached blocks of another worker; its deadline is its source's, and nothing renews either.
    """

    key: JourneyKey
    lease_id: str
    lease_ms: int
    num_tokens: int
    num_prompt_blocks: int
    num_held_blocks: int
    block_ids: tuple[int, ...]
    deadline_s: float
    state: LeaseState = LeaseState.RESERVED
    source: SourceInfo | None = None
    peer_deadline_s: float = float("inf")
    next_renewal_s: float = float("inf")
    pieces: PieceTable | None = None
    closing: Closing | None = None
    fetches: dict[int, Fetch] = field(default_factory=dict)
    may_have_pieces: bool = False
    pulling_s: float = 0.0
    closed_s: float = 0.0
    transport: str = ""
    num_hidden_bytes: int = 0
    is_prefix: bool = False

    @property
    def is_live(self) -> bool:
        return self.state in (LeaseState.RESERVED, LeaseState.PULLING, LeaseState.BROKEN)

    def apply(self, event: LeaseEvent) -> None:
        following = TRANSITIONS[self.state].get(event)
        assert following is not None, f"{self.key}: {event.value} is not possible in state {self.state.value}"
        self.state = following

    def missing_blocks(self) -> tuple[int, ...]:
        """Logical numbers of the prompt's blocks that are neither held nor verified."""
        if self.pieces is not None:
            return self.pieces.missing_blocks()
        return tuple(range(self.num_held_blocks, self.num_prompt_blocks))

    def num_reusable_blocks(self) -> int:
        """Leading full blocks that a next attempt need not send."""
        return self.num_held_blocks if self.pieces is None else self.pieces.num_leading_full_blocks()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fetch:
    """One batch in flight.

    Attributes:
        number: unique in the life of the book.
        block_ids: of this arena, one a piece of the batch.
    """

    number: int
    lease: LeaseRecord
    batch: Batch
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completed:
    """Everything is here and verified, or the first token ended the request (state FINISHED)."""

    lease: LeaseRecord


@dataclass(frozen=True, slots=True)
class Broke:
    """The pull has failed and must stop; the lease lives on, and with it the fetches in flight."""

    lease: LeaseRecord
    error: PdRelayError
    missing_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The lease has ended without its blocks being handed over: whatever still works for it must stop. Its fetches in
    flight are stopped and then reported by `DestinationBook.quiesced`."""

    lease: LeaseRecord


News = Completed | Broke | Ended
