"""The destination's leases as one pure state machine: no clock, no socket, no memory. Time is passed in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.destination_state import Broke, Completed, Ended, Fetch, LeaseEvent, LeaseRecord, LeaseState, News
from kv_transfer.fetch_turns import FETCH_BYTES, FetchTurns
from kv_transfer.journey import JourneyKey, SourceInfo
from kv_transfer.lease_blocks import LeaseBlocks
from kv_transfer.manifest import Closing, Opening, Records
from kv_transfer.pieces import PieceTable
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.layout import CacheLayout
from pd_engine.errors import DataLoss, DeadlineExceeded, Gone, InvalidArgument, PdRelayError
from pd_engine.service.tombstones import Tombstones

RENEWALS_A_LEASE = 3


class DestinationBook:
    """All leases of one destination. Whoever calls it collects `take_news` afterwards.

    Args:
        pool: where the blocks come from; held under `JourneyKey.owner`.
        max_bytes_in_flight: of all fetches together (one piece always may).
        max_refetches: of one piece.
        fetch_bytes: of one fetch at most.
    """

    def __init__(
        self, layout: CacheLayout, pool: BlockPool, *, max_bytes_in_flight: int, max_refetches: int,
        fetch_bytes: int = FETCH_BYTES,
    ) -> None:
        self._layout = layout
        self._max_refetches = max_refetches
        self._live: dict[str, LeaseRecord] = {}  # by journey
        self._tombstones = Tombstones()
        self._blocks = LeaseBlocks(pool, block_size=layout.block_size)
        self._turns = FetchTurns(
            max_bytes_in_flight=max_bytes_in_flight,
            max_piece_bytes=max(layout.piece_bytes(component) for component in range(len(layout.components))),
            fetch_bytes=fetch_bytes,
        )
        self._news: list[News] = []

    @property
    def num_leases(self) -> int:
        return len(self._live)

    @property
    def num_quarantined(self) -> int:
        return self._blocks.num_quarantined

    @property
    def num_bytes_in_flight(self) -> int:
        return self._turns.num_bytes_in_flight

    def take_news(self) -> list[News]:
        """What has happened since the last call, in order."""
        news, self._news = self._news, []
        return news

    def get(self, key: JourneyKey) -> LeaseRecord | None:
        """The live lease with exactly this key."""
        lease = self._live.get(key.journey_id)
        return lease if lease is not None and lease.key == key else None

    def live_keys(self) -> list[JourneyKey]:
        return [lease.key for lease in self._live.values()]

    # The router's calls.

    def reserve(
        self, key: JourneyKey, *, lease_id: str, lease_ms: int, num_tokens: int, num_blocks: int,
        held_block_ids: Sequence[int], now_s: float, is_prefix: bool = False,
    ) -> LeaseRecord:
        """Grants a lease, answers the one with the same key, or takes the journey's lease over.

        Args:
            is_prefix: what is pulled is another worker's cached prefix: the lease is never renewed.

        Raises:
            Gone: released up to this attempt, or a higher attempt was seen.
            ResourceExhausted: too few free blocks; the journey holds none then.
        """
        known = self._live.get(key.journey_id)
        if known is not None and known.key == key:
            return known
        if self._tombstones.is_gone(key.journey_id, key.attempt) or (known and known.key.attempt > key.attempt):
            raise Gone
        num_prompt_blocks = self._layout.num_blocks_for(num_tokens)
        assert len(held_block_ids) <= num_tokens // self._layout.block_size, (len(held_block_ids), num_tokens)
        assert num_prompt_blocks <= num_blocks, (num_tokens, num_blocks)
        held, kept = self._blocks.hold(held_block_ids, key.owner), tuple[int, ...]()
        if known is not None:
            held, kept = self._blocks.taken_over(known, held, num_tokens, num_blocks)
            self._end(known, LeaseEvent.TAKE_OVER, now_s)
        block_ids = self._blocks.complete(held, kept, num_blocks, key.owner)
        lease = LeaseRecord(
            key=key, lease_id=lease_id, lease_ms=lease_ms, num_tokens=num_tokens,
            num_prompt_blocks=num_prompt_blocks, num_held_blocks=len(held), block_ids=block_ids,
            deadline_s=now_s + lease_ms / 1000, is_prefix=is_prefix,
        )
        self._live[key.journey_id] = lease
        return lease

    def pull(self, key: JourneyKey, lease_id: str, source: SourceInfo, now_s: float) -> LeaseRecord | None:
        """The lease whose pull is to start now; None if it has started before.

        Raises:
            Gone: there is no such lease.
        """
        lease = self.get(key)
        if lease is None or lease.lease_id != lease_id:
            raise Gone
        if lease.state is not LeaseState.RESERVED:
            return None
        lease.apply(LeaseEvent.PULL)
        lease.source, lease.pulling_s = source, now_s
        if not lease.is_prefix:
            lease.peer_deadline_s = now_s + lease.lease_ms / 1000
            lease.next_renewal_s = now_s + lease.lease_ms / 1000 / RENEWALS_A_LEASE
        self._turns.join(lease)
        return lease

    def keep(self, key: JourneyKey, lease_id: str, now_s: float) -> LeaseRecord:
        """Ends a lease under which nothing was pulled: its blocks are the worker's, still held under `key.owner`.

        Raises:
            Gone: there is no such lease.
        """
        lease = self.get(key)
        if lease is None or lease.lease_id != lease_id or lease.state is not LeaseState.RESERVED:
            raise Gone
        lease.apply(LeaseEvent.KEEP)
        del self._live[key.journey_id]
        self._tombstones.bury(key.journey_id, key.attempt, now_s)
        return lease

    def renew(self, key: JourneyKey, now_s: float) -> bool:
        """The router vouches for the journey. False: there is no such lease."""
        lease = self.get(key)
        if lease is not None and not lease.is_prefix:
            lease.deadline_s = max(lease.deadline_s, now_s + lease.lease_ms / 1000)
        return lease is not None

    def release(self, journey_id: str, up_to_attempt: int, now_s: float) -> None:
        """Ends the journey's lease up to that attempt, and whatever of it arrives later."""
        self._tombstones.bury(journey_id, up_to_attempt, now_s)
        lease = self._live.get(journey_id)
        if lease is not None and lease.key.attempt <= up_to_attempt:
            self._end(lease, LeaseEvent.RELEASE, now_s)

    def tick(self, now_s: float) -> None:
        """Ends what has expired, breaks the pulls whose source is stalled."""
        for lease in list(self._live.values()):
            if lease.peer_deadline_s <= now_s:
                self.break_pull(lease, DeadlineExceeded(f"the source said nothing for {lease.lease_ms} ms"))
            if lease.deadline_s <= now_s:
                self.break_pull(lease, DeadlineExceeded(f"the lease has expired: {lease.lease_ms} ms without renewal"))
                self._end(lease, LeaseEvent.EXPIRE, now_s)
        self._tombstones.tick(now_s)

    # What the source says. Late words for a lease that does not pull any more are ignored.

    def renewals_due(self, now_s: float) -> list[LeaseRecord]:
        """Leases whose source is to be asked now."""
        due = [lease for lease in self._turns.leases() if lease.next_renewal_s <= now_s]
        for lease in due:
            lease.next_renewal_s = now_s + lease.lease_ms / 1000 / RENEWALS_A_LEASE
        return due

    def heard(self, lease: LeaseRecord, sent_s: float) -> None:
        """The source answered a renewal that was sent at `sent_s`: it keeps its pins beyond `sent_s` + the lease."""
        if lease.state is LeaseState.PULLING:
            until_s = sent_s + lease.lease_ms / 1000
            lease.peer_deadline_s = max(lease.peer_deadline_s, until_s)
            lease.deadline_s = max(lease.deadline_s, until_s)

    def opened(self, lease: LeaseRecord, opening: Opening) -> None:
        """The manifest begins, or begins again after a reconnect.

        Raises:
            InvalidArgument: it is not about what was asked for.
        """
        asked = (lease.num_tokens, lease.num_held_blocks)
        if (opening.num_tokens, opening.num_held_blocks) != asked:
            raise InvalidArgument(
                f"manifest: (num_tokens, num_held_blocks) must be {asked}, got "
                f"{(opening.num_tokens, opening.num_held_blocks)}"
            )
        if lease.pieces is None:
            lease.pieces = PieceTable(
                self._layout, *asked, num_arena_blocks=opening.num_arena_blocks, max_refetches=self._max_refetches
            )

    def announced(self, lease: LeaseRecord, records: Records) -> None:
        """Raises: InvalidArgument: see `PieceTable.announce`; nothing has been taken in."""
        if lease.state is LeaseState.PULLING:
            assert lease.pieces is not None, "pieces before the opening"
            lease.pieces.announce(records)
            lease.may_have_pieces = True

    def closed(self, lease: LeaseRecord, closing: Closing, now_s: float) -> None:
        """Raises: InvalidArgument: something was never announced, the lengths are wrong, or it is of a prefix where a
        prompt was asked for, or the other way round."""
        if lease.state is not LeaseState.PULLING:
            return
        if (closing.first_token_id is None) is not lease.is_prefix or (lease.is_prefix and closing.finish_reason):
            raise InvalidArgument("manifest: a prompt closes with a first token, a prefix without one")
        assert lease.pieces is not None, "closing before the opening"
        if closing.num_prompt_tokens > lease.num_tokens:
            raise InvalidArgument(
                f"manifest: num_prompt_tokens must be at most {lease.num_tokens}, got {closing.num_prompt_tokens}"
            )
        if closing.finish_reason is None and not lease.pieces.is_announced:
            raise InvalidArgument("manifest: closed before every piece was announced")
        lease.closing, lease.closed_s = closing, now_s
        lease.num_hidden_bytes = lease.pieces.num_verified_bytes
        if closing.finish_reason is not None:
            self._news.append(Completed(lease))
            self._end(lease, LeaseEvent.FINISH, now_s)
        else:
            self._progress(lease, now_s)

    def break_pull(self, lease: LeaseRecord, error: PdRelayError) -> None:
        """The pull has failed; the lease waits for the router's next attempt."""
        if lease.state is LeaseState.PULLING:
            lease.apply(LeaseEvent.BREAK)
            self._leave_turns(lease)
            self._news.append(Broke(lease, error, lease.missing_blocks()))

    # Fetches.

    def next_fetch(self) -> Fetch | None:
        """What to fetch now: leases take turns, within the budget of bytes in flight."""
        return self._turns.next_fetch()

    def fetched(self, fetch: Fetch, is_right_N: npt.NDArray[np.bool_], now_s: float) -> None:
        """The fetch has ended and was verified: which of its pieces are right. It cannot write any more."""
        self.quiesced(fetch)
        lease = fetch.lease
        if lease.is_live and lease.pieces is not None:
            lease.pieces.settle(fetch.batch, is_right_N)
            lease.may_have_pieces = True
            self._progress(lease, now_s)

    def quiesced(self, fetch: Fetch) -> None:
        """The fetch, which failed or was stopped, cannot write any more."""
        self._turns.end(fetch)
        self._blocks.quiesced(fetch.number)

    # Inside.

    def _progress(self, lease: LeaseRecord, now_s: float) -> None:
        """Commits what is complete, breaks what cannot become complete."""
        assert lease.pieces is not None
        if lease.state is not LeaseState.PULLING:
            return
        if lease.closing is not None and lease.pieces.is_verified:
            self._leave_turns(lease)
            lease.apply(LeaseEvent.COMMIT)
            del self._live[lease.key.journey_id]
            self._tombstones.bury(lease.key.journey_id, lease.key.attempt, now_s)
            self._news.append(Completed(lease))
        elif lease.pieces.has_lost and lease.pieces.is_settled:
            missing = lease.missing_blocks()
            self.break_pull(lease, DataLoss(f"blocks {list(missing)[:16]} of {lease.key} could not be verified"))

    def _end(self, lease: LeaseRecord, event: LeaseEvent, now_s: float) -> None:
        """Gives the lease's blocks back."""
        lease.apply(event)
        self._leave_turns(lease)
        del self._live[lease.key.journey_id]
        self._tombstones.bury(lease.key.journey_id, lease.key.attempt, now_s)
        self._blocks.give_back(lease)
        self._news.append(Ended(lease))

    def _leave_turns(self, lease: LeaseRecord) -> None:
        lease.peer_deadline_s = lease.next_renewal_s = float("inf")
        self._turns.leave(lease)
