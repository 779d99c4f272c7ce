"""The source's handoffs as one pure state machine: no clock, no socket, no memory. Time is passed in."""

from __future__ import annotations

from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import Closing, Failed, Records
from kv_transfer.source_state import MARGIN_S, SourceEvent, SourceHandoff, SourceState
from pd_engine.errors import AlreadyExists, FailedPrecondition, Gone
from pd_engine.service.tombstones import LONGEST_MESSAGE_LIFE_S, Tombstones


class SourceBook:
    """All handoffs of one source, by journey. Whoever calls it collects `take_ended` afterwards.

    Args:
        epoch: this life of the process.
    """

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._live: dict[str, SourceHandoff] = {}                  # by journey
        self._tokens: dict[str, SourceHandoff] = {}                # of live handoffs
        self._committed: dict[str, tuple[JourneyKey, float]] = {}  # token -> (key, forget at), oldest first
        self._tombstones = Tombstones()
        self._ended: list[SourceHandoff] = []

    @property
    def num_pins(self) -> int:
        return len(self._live)

    def begin(self, handoff: SourceHandoff, now_s: float) -> SourceHandoff:
        """Takes the handoff in, or answers the one that has the same key already.

        Raises:
            Gone: released up to this attempt, or a higher attempt was seen.
            AlreadyExists: the same key with other blocks or lengths.
        """
        key = handoff.key
        known = self._live.get(key.journey_id)
        if known is not None and known.key == key:
            if (known.block_ids, known.num_tokens, known.num_held_blocks) != (
                handoff.block_ids, handoff.num_tokens, handoff.num_held_blocks
            ):
                raise AlreadyExists(f"{key} has begun with other blocks or lengths")
            return known
        if self._tombstones.is_gone(key.journey_id, key.attempt) or (known and known.key.attempt > key.attempt):
            raise Gone
        if known is not None:
            self._end(known, SourceEvent.SUPERSEDE, now_s)
        self._live[key.journey_id] = handoff
        self._tokens[handoff.token] = handoff
        return handoff

    def get(self, key: JourneyKey) -> SourceHandoff | None:
        """The live handoff with exactly this key."""
        handoff = self._live.get(key.journey_id)
        return handoff if handoff is not None and handoff.key == key else None

    def has_journey(self, journey_id: str) -> bool:
        """Whether a handoff of it is live, whatever the attempt."""
        return journey_id in self._live

    def by_token(self, token: str) -> SourceHandoff | None:
        """The live handoff whose capability this is."""
        return self._tokens.get(token)

    def present(self, key: JourneyKey, token: str) -> SourceHandoff:
        """The live handoff that a peer names, with its capability.

        Raises:
            Gone: there is none, or the token is another one's.
        """
        handoff = self._tokens.get(token)
        if handoff is None or handoff.key != key:
            raise Gone
        return handoff

    def open(
        self, key: JourneyKey, token: str, *, source_epoch: str, puller_epoch: str, lease_ms: int, now_s: float
    ) -> SourceHandoff:
        """A destination asks for the manifest; it may ask again, another life of it may not. Renews the lease.

        Raises:
            Gone: no such handoff in this life, or it belongs to another puller.
        """
        handoff = self.present(key, token)
        if source_epoch != self._epoch or handoff.puller_epoch not in (None, puller_epoch):
            raise Gone
        handoff.puller_epoch = puller_epoch
        self.renew(handoff, lease_ms, now_s)
        return handoff

    def publish(self, key: JourneyKey, records: Records) -> SourceHandoff | None:
        """Adds announced pieces. None if the handoff has ended or closed: a late call is ignored."""
        handoff = self.get(key)
        if handoff is None or handoff.state is not SourceState.PUBLISHING:
            return None
        if len(records):
            handoff.records.append(records)
        return handoff

    def close(self, key: JourneyKey, closing: Closing) -> SourceHandoff | None:
        """Everything that will be is published. Where the first token ends the request nobody needs the blocks, but the
        pins last until the destination or the router has said so: who is fetching would take their end for a loss."""
        handoff = self.get(key)
        if handoff is None or handoff.state is not SourceState.PUBLISHING:
            return None
        handoff.closing = closing
        handoff.apply(SourceEvent.CLOSE)
        return handoff

    def fail(self, key: JourneyKey, failed: Failed, now_s: float) -> SourceHandoff | None:
        handoff = self.get(key)
        if handoff is not None:
            handoff.failed = failed
            self._end(handoff, SourceEvent.FAIL, now_s)
        return handoff

    def commit(self, key: JourneyKey, token: str, now_s: float) -> None:
        """The destination has verified everything, or needs nothing. The same commit again is answered alike.

        Raises:
            Gone: there is no such handoff.
            FailedPrecondition: it is not closed, so nobody can have everything.
        """
        committed = self._committed.get(token)
        if committed is not None and committed[0] == key:
            return
        handoff = self.present(key, token)
        if handoff.state is not SourceState.CLOSED:
            raise FailedPrecondition(f"commit of a handoff that is {handoff.state.value}, not closed")
        self._committed[token] = (key, now_s + LONGEST_MESSAGE_LIFE_S)
        self._end(handoff, SourceEvent.COMMIT, now_s)

    def renew(self, handoff: SourceHandoff, lease_ms: int, now_s: float) -> None:
        """The lease runs `lease_ms` (what remains of the destination's) and the margin from now; never shorter, and
        never beyond the last deadline."""
        assert handoff.is_live, handoff.state
        until_s = max(handoff.deadline_s, now_s + lease_ms / 1000 + MARGIN_S)
        handoff.deadline_s = min(until_s, handoff.last_deadline_s)

    def release(self, journey_id: str, up_to_attempt: int, now_s: float) -> None:
        """Ends the journey up to that attempt, and whatever of it arrives later."""
        self._tombstones.bury(journey_id, up_to_attempt, now_s)
        handoff = self._live.get(journey_id)
        if handoff is not None and handoff.key.attempt <= up_to_attempt:
            self._end(handoff, SourceEvent.RELEASE, now_s)

    def tick(self, now_s: float) -> None:
        """Ends what has expired, forgets what may be forgotten."""
        for handoff in [h for h in self._live.values() if h.deadline_s <= now_s]:
            self._end(handoff, SourceEvent.EXPIRE, now_s)
        self._tombstones.tick(now_s)
        while self._committed:
            token, (_, forget_at_s) = next(iter(self._committed.items()))
            if forget_at_s > now_s:
                break
            del self._committed[token]

    def live_keys(self) -> list[JourneyKey]:
        return [handoff.key for handoff in self._live.values()]

    def take_ended(self) -> list[SourceHandoff]:
        """Handoffs that have ended since the last call, in order: their pins are to be released now."""
        ended, self._ended = self._ended, []
        return ended

    def _end(self, handoff: SourceHandoff, event: SourceEvent, now_s: float) -> None:
        handoff.apply(event)
        del self._live[handoff.key.journey_id]
        del self._tokens[handoff.token]
        self._tombstones.bury(handoff.key.journey_id, handoff.key.attempt, now_s)
        self._ended.append(handoff)
