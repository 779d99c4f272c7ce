"""Bugs that have happened to people who move caches between machines, as small changes of the production classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.destination_book import DestinationBook
from kv_transfer.destination_state import Completed, Fetch, LeaseEvent, LeaseRecord, LeaseState
from kv_transfer.holds import HoldSpec, PrefixHolder
from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import Closing
from kv_transfer.quarantine import Quarantine
from kv_transfer.source_book import SourceBook
from kv_transfer.source_state import MARGIN_S, SourceEnd, SourceEvent, SourceHandoff
from kv_transfer.transport import Checksums, Fetched
from kv_transfer.verification import verify
from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.service.tombstones import Tombstones


class EpochNotChecked(SourceBook):
    def open(
        self, key: JourneyKey, token: str, *, source_epoch: str, puller_epoch: str, lease_ms: int, now_s: float
    ) -> SourceHandoff:
        handoff = self.present(key, token)
        self.renew(handoff, lease_ms, now_s)
        return handoff


class FreedAtClosing(SourceBook):
    """The pins end when everything is published, not when it has been fetched."""

    def close(self, key: JourneyKey, closing: Closing) -> SourceHandoff | None:
        handoff = super().close(key, closing)
        if handoff is not None and handoff.is_live:
            self._end(handoff, SourceEvent.RELEASE, handoff.deadline_s)
        return handoff


class RenewalForgotten(SourceBook):
    """A renewal is answered, but the pins end when they would have ended."""

    def renew(self, handoff: SourceHandoff, lease_ms: int, now_s: float) -> None:
        return


class HoldIsRenewed(SourceBook):
    """What a reader says makes the pins of a prefix last longer, for as long as it likes."""

    def renew(self, handoff: SourceHandoff, lease_ms: int, now_s: float) -> None:
        handoff.deadline_s = max(handoff.deadline_s, now_s + lease_ms / 1000 + MARGIN_S)


class HoldEndsBeforeItsReader(SourceBook):
    """The pins of a prefix end while its reader still counts on them."""

    def tick(self, now_s: float) -> None:
        for handoff in [h for h in self._live.values() if h.last_deadline_s - 1.3 * MARGIN_S <= now_s]:
            self._end(handoff, SourceEvent.EXPIRE, now_s)
        super().tick(now_s)


class PinsOfHoldsForgotten(PrefixHolder):
    """The end of a hold frees nothing."""

    def _on_end(self, key: JourneyKey, reason: SourceEnd) -> None:
        del self._holds[key]


class HoldsWithoutBound(PrefixHolder):
    def _found(self, spec: HoldSpec) -> Sequence[int]:
        self._max_holds = len(self._holds) + 1
        return super()._found(spec)


class PrefixLeaseIsRenewed(DestinationBook):
    """The router's word makes the lease of a prefix outlive the pins that it counts on."""

    def renew(self, key: JourneyKey, now_s: float) -> bool:
        lease = self.get(key)
        if lease is not None:
            lease.deadline_s = max(lease.deadline_s, now_s + lease.lease_ms / 1000)
        return lease is not None


class SourceNeverExpires(SourceBook):
    def tick(self, now_s: float) -> None:
        return


class CommittedBeforeVerified(DestinationBook):
    def _progress(self, lease: LeaseRecord, now_s: float) -> None:
        if lease.state is LeaseState.PULLING and lease.closing is not None:
            self._leave_turns(lease)
            lease.apply(LeaseEvent.COMMIT)
            del self._live[lease.key.journey_id]
            self._news.append(Completed(lease))
        else:
            super()._progress(lease, now_s)


class _NoQuarantine(Quarantine):
    def put(self, fetches: Mapping[int, Iterable[int]], owner: str) -> None:
        for block in {block for blocks in fetches.values() for block in blocks}:
            self._pool.release([block], owner)


class NoQuarantine(DestinationBook):
    """A released block is free at once, whatever still writes to it."""

    def __init__(self, layout: Any, pool: BlockPool, **limits: int) -> None:
        super().__init__(layout, pool, **limits)
        self._blocks._quarantine = _NoQuarantine(pool)


class _ShortQuarantine(Quarantine):
    def quiesced(self, number: int) -> None:
        super().quiesced(number)
        for other in list(self._blocks_of):
            super().quiesced(other)


class QuarantineEndsWithTheFirstFetch(DestinationBook):
    """The end of one fetch is taken for the end of all."""

    def __init__(self, layout: Any, pool: BlockPool, **limits: int) -> None:
        super().__init__(layout, pool, **limits)
        self._blocks._quarantine = _ShortQuarantine(pool)


class _NoTombstones(Tombstones):
    def bury(self, journey_id: str, up_to_attempt: int, now_s: float) -> None:
        return


class NoTombstones(DestinationBook):
    """A release leaves no trace: what it overtook is served."""

    def __init__(self, layout: Any, pool: BlockPool, **limits: int) -> None:
        super().__init__(layout, pool, **limits)
        self._tombstones = _NoTombstones()


class LeaseNeverExpires(DestinationBook):
    def tick(self, now_s: float) -> None:
        return


class BudgetIgnored(DestinationBook):
    def __init__(self, layout: Any, pool: BlockPool, **limits: int) -> None:
        super().__init__(layout, pool, **{**limits, "max_bytes_in_flight": 1 << 30})


class TakeoverKeepsWhatIsInFlight(DestinationBook):
    """The next attempt gets blocks to which the last one's fetches still write."""

    def _end(self, lease: LeaseRecord, event: LeaseEvent, now_s: float) -> None:
        if event is LeaseEvent.TAKE_OVER:
            in_flight, lease.fetches = lease.fetches, {}
            super()._end(lease, event, now_s)
            lease.fetches = in_flight
        else:
            super()._end(lease, event, now_s)


def generation_read_once(
    fetch: Fetch, fetched: Fetched, arena: Arena, checksums: Checksums | None
) -> npt.NDArray[np.bool_]:
    """Before the copy only."""
    once = Fetched(generations_before=fetched.generations_before, generations_after=fetched.generations_before)
    return verify(fetch, once, arena, checksums)


def checksum_not_compared(
    fetch: Fetch, fetched: Fetched, arena: Arena, checksums: Checksums | None
) -> npt.NDArray[np.bool_]:
    return verify(fetch, fetched, arena, None)


def nothing_verified(
    fetch: Fetch, fetched: Fetched, arena: Arena, checksums: Checksums | None
) -> npt.NDArray[np.bool_]:
    return np.ones(len(fetch.batch), dtype=np.bool_)
