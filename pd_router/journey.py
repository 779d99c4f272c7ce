"""The life of one choice in one router: a state machine without clock, socket or RPC.

    WAITING -> RESERVING -> PREFILLING -> PULLING -> DECODING -> STOPPED | LENGTH
       ^           |            |            |          |
       +-----------+------------+------------+----------+   an attempt failed and another may follow

Every state may also go to CANCELLED or FAILED, and to REJECTED as long as no token was sent. Each attempt has a
number, raised with every placement; what belongs to another attempt than the present one is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pd_engine.errors import Cancelled, ErrorCode, PdRelayError
from pd_engine.sequence import FinishReason, SampledToken
from pd_router.placement import Placement
from pd_router.stream import Chunk, TokenStream


class JourneyState(Enum):
    __hash__ = object.__hash__  # Enum's own is Python, and three states are looked up a token

    WAITING = "waiting"  # to be placed
    RESERVING = "reserving"  # the decode worker is asked for a lease
    PREFILLING = "prefilling"  # the prefill worker is at it
    PULLING = "pulling"  # ... and the decode worker fetches what it has published
    DECODING = "decoding"  # a token of this attempt is known
    STOPPED = "stopped"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"


_S = JourneyState
_ABANDON = frozenset({_S.CANCELLED, _S.FAILED})
_RETRY = frozenset({_S.WAITING})
_DONE = frozenset({_S.STOPPED, _S.LENGTH})

TRANSITIONS: dict[JourneyState, frozenset[JourneyState]] = {
    _S.WAITING: frozenset({_S.RESERVING, _S.PREFILLING, _S.REJECTED}) | _ABANDON,
    _S.RESERVING: frozenset({_S.PREFILLING, _S.REJECTED}) | _RETRY | _ABANDON,
    _S.PREFILLING: frozenset({_S.PULLING, _S.DECODING, _S.REJECTED}) | _DONE | _RETRY | _ABANDON,
    _S.PULLING: frozenset({_S.DECODING, _S.REJECTED}) | _DONE | _RETRY | _ABANDON,
    _S.DECODING: _DONE | _RETRY | _ABANDON,
    _S.STOPPED: frozenset(),
    _S.LENGTH: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.REJECTED: frozenset(),
    _S.FAILED: frozenset(),
}

TERMINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
TAKES_TOKENS = frozenset({_S.PREFILLING, _S.PULLING, _S.DECODING})
_REFUSALS = frozenset(
    {
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND,
        ErrorCode.FAILED_PRECONDITION,
        ErrorCode.RESOURCE_EXHAUSTED,
    }
)
_STATE_AT_END = {FinishReason.STOP: _S.STOPPED, FinishReason.LENGTH: _S.LENGTH}


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffReport:
    """What moved, as the decode worker reports it once the handoff is committed; in `pull_s` seconds, `exposed_s` of
    which after the prompt was computed."""

    prefill_worker: str
    decode_worker: str
    num_bytes: int
    num_hidden_bytes: int
    pull_s: float
    exposed_s: float
    transport: str
    block_checksums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPrefillReport:
    """A decode worker has computed the prompt itself; checksums of its blocks if they were asked for."""

    worker: str
    block_checksums: tuple[int, ...]


class Journey:
    """Attributes:
    state: where it is.
    attempt: number of the present placement, 0 before the first.
    num_failures: attempts that failed for another reason than a lack of room.
    stream: its tokens so far.
    error: why it was rejected or failed; None otherwise.
    handoff: of the attempt that handed over, None before.
    local_prefill: of the last attempt whose decode worker computed the prompt, None before.
    placement: of the present attempt, None before the first.
    num_cached_tokens: prompt tokens that the first placement did not compute.
    """

    def __init__(self, journey_id: str, stream: TokenStream, *, max_attempts: int) -> None:
        self.journey_id = journey_id
        self.state = JourneyState.WAITING
        self.attempt = 0
        self.num_failures = 0
        self.stream = stream
        self.error: PdRelayError | None = None
        self.handoff: HandoffReport | None = None
        self.local_prefill: LocalPrefillReport | None = None
        self.placement: Placement | None = None
        self.num_cached_tokens: int | None = None
        self._max_attempts = max_attempts
        self._drafts_before = (0, 0)  # accepted and drafted tokens of earlier attempts
        self._drafts = (0, 0)

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def num_accepted(self) -> int:
        return self._drafts_before[0] + self._drafts[0]

    @property
    def num_drafted(self) -> int:
        return self._drafts_before[1] + self._drafts[1]

    def place(self, *, with_decode: bool) -> int:
        """A new attempt begins; its number. Without a decode worker, prefill samples the only token that is left."""
        self._move(JourneyState.RESERVING if with_decode else JourneyState.PREFILLING)
        self.attempt += 1
        self._drafts_before = (self.num_accepted, self.num_drafted)
        self._drafts = (0, 0)
        self.stream.restart()
        return self.attempt

    def reserved(self, attempt: int) -> bool:
        """The lease is granted. False: of another attempt, or too late; the lease is to be released."""
        return self._advance(attempt, JourneyState.RESERVING, JourneyState.PREFILLING)

    def source_known(self, attempt: int) -> bool:
        """The prefill worker has said where to pull from. False: nobody is to pull."""
        return self._advance(attempt, JourneyState.PREFILLING, JourneyState.PULLING)

    def take_tokens(self, attempt: int, index: int, tokens: Sequence[SampledToken]) -> Chunk | None:
        """What is new of an attempt's tokens, the journey's end included; None if nothing is.

        Raises:
            DataLoss: they contradict what was sent; the attempt is to fail.
        """
        if attempt != self.attempt or self.state not in TAKES_TOKENS:
            return None
        chunk = self.stream.push(index, tokens)
        if self.stream.end is not None:
            self._move(_STATE_AT_END[self.stream.end.finish_reason])
        elif chunk is not None and self.state is not JourneyState.DECODING:
            self._move(JourneyState.DECODING)
        return chunk

    def note_drafts(self, attempt: int, *, num_accepted: int, num_drafted: int) -> None:
        """Running totals of the attempt."""
        if attempt == self.attempt and self.state in TAKES_TOKENS:
            self._drafts = (num_accepted, num_drafted)

    def note_handoff(self, attempt: int, handoff: HandoffReport) -> None:
        if attempt == self.attempt and self.state in TAKES_TOKENS:
            self.handoff = handoff

    def note_local_prefill(self, attempt: int, report: LocalPrefillReport) -> None:
        if attempt == self.attempt and self.state in TAKES_TOKENS:
            self.local_prefill = report

    def note_cached_tokens(self, attempt: int, num_cached_tokens: int) -> None:
        """Only the first report counts: a later placement of the same prompt finds more in the caches."""
        if attempt == self.attempt and self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens

    def fail_attempt(self, attempt: int, error: PdRelayError, *, retryable: bool, counts: bool = True) -> None:
        """The attempt is over without an end: another may follow, or the journey is rejected or has failed.

        Args:
            counts: against the most attempts; a worker without room does not.
        """
        if attempt != self.attempt or self.ended or self.state is JourneyState.WAITING:
            return
        self.num_failures += counts
        if retryable and self.num_failures < self._max_attempts:
            self._move(JourneyState.WAITING)
        else:
            self.give_up(error)

    def give_up(self, error: PdRelayError) -> None:
        """No attempt will follow: rejected if it was refused before a token was sent, failed otherwise."""
        if self.ended:
            return
        self.error = error
        refused = self.attempt == 0 or error.code in _REFUSALS
        rejected = refused and not self.stream.has_begun
        self._move(JourneyState.REJECTED if rejected else JourneyState.FAILED)

    def cancel(self) -> None:
        if not self.ended:
            self.error = Cancelled("the request was cancelled")
            self._move(JourneyState.CANCELLED)

    def _advance(self, attempt: int, expected: JourneyState, following: JourneyState) -> bool:
        if attempt != self.attempt or self.state is not expected:
            return False
        self._move(following)
        return True

    def _move(self, state: JourneyState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.journey_id}: {self.state.value} -> {state.value}"
        self.state = state
