"""Who fetches next: the leases that pull take turns, within a budget of bytes in flight. Pure."""

from __future__ import annotations

from collections import Counter, deque

from kv_transfer.destination_state import Fetch, LeaseRecord

FETCH_BYTES = 4 * 1024 * 1024  # one batch at most: what fairness and stopping are counted in
MAX_FETCHES_A_LEASE = 4


class FetchTurns:
    """All fetches of a destination. A source has no more bytes in flight than it leaves to the others, so those that
    are stalled never take all of the budget.

    Args:
        max_bytes_in_flight: of all fetches together, those of ended leases included.
        max_piece_bytes: of the layout; one piece may always be in flight.
        fetch_bytes: of one fetch at most (one piece always may).
    """

    def __init__(self, *, max_bytes_in_flight: int, max_piece_bytes: int, fetch_bytes: int) -> None:
        self._max_bytes_in_flight = max_bytes_in_flight
        self._max_piece_bytes = max_piece_bytes
        self._fetch_bytes = fetch_bytes
        self._turns: deque[LeaseRecord] = deque()  # next one first
        self._in_flight: dict[int, Fetch] = {}
        self._num_bytes_of: Counter[str] = Counter()  # in flight, by the source's epoch
        self._num_fetches = 0
        self.num_bytes_in_flight = 0

    def leases(self) -> list[LeaseRecord]:
        return list(self._turns)

    def join(self, lease: LeaseRecord) -> None:
        self._turns.append(lease)

    def leave(self, lease: LeaseRecord) -> None:
        """Nothing more is fetched for it; what is in flight stays in flight."""
        if lease in self._turns:
            self._turns.remove(lease)

    def next_fetch(self) -> Fetch | None:
        """What to fetch now, or None: nothing is announced, or the budget is used up."""
        room = self._max_bytes_in_flight - self.num_bytes_in_flight
        if self._in_flight and room < self._max_piece_bytes:
            return None
        for _ in range(len(self._turns)):
            lease = self._turns[0]
            self._turns.rotate(-1)
            fetch = self._take(lease, self._share(lease, room))
            if fetch is not None:
                return fetch
        return None

    def end(self, fetch: Fetch) -> None:
        """It cannot write any more."""
        del self._in_flight[fetch.number]
        self.num_bytes_in_flight -= fetch.batch.num_bytes
        epoch = _epoch(fetch.lease)
        self._num_bytes_of[epoch] -= fetch.batch.num_bytes
        if not self._num_bytes_of[epoch]:
            del self._num_bytes_of[epoch]
        del fetch.lease.fetches[fetch.number]

    def _share(self, lease: LeaseRecord, room: int) -> int:
        """Of the room, what the lease's source may take; 0: nothing now."""
        own = self._num_bytes_of[_epoch(lease)]
        if own and room - own < self._max_piece_bytes:
            return 0
        return max(room - own, 1)

    def _take(self, lease: LeaseRecord, room: int) -> Fetch | None:
        if not room or not lease.may_have_pieces or len(lease.fetches) >= MAX_FETCHES_A_LEASE:
            return None
        assert lease.pieces is not None
        batch = lease.pieces.take(max_bytes=min(self._fetch_bytes, room))
        if batch is None:
            lease.may_have_pieces = False
            return None
        self._num_fetches += 1
        fetch = Fetch(
            number=self._num_fetches, lease=lease, batch=batch,
            block_ids=tuple(lease.block_ids[block] for block in batch.blocks.tolist()),
        )
        lease.fetches[fetch.number] = self._in_flight[fetch.number] = fetch
        self.num_bytes_in_flight += batch.num_bytes
        self._num_bytes_of[_epoch(lease)] += batch.num_bytes
        return fetch


def _epoch(lease: LeaseRecord) -> str:
    assert lease.source is not None, f"{lease.key} is not pulled"
    return lease.source.epoch
