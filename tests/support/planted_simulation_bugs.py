"""Bugs to plant into production classes, of kinds that were made somewhere before: the simulation must find each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest

import kv_transfer.pull
from decode_worker.core import DecodeCore
from decode_worker.endings import ChoiceEnds
from decode_worker.host_tier import HostCopy
from kv_transfer.destination_book import DestinationBook
from kv_transfer.destination_state import LeaseRecord
from kv_transfer.quarantine import Quarantine
from pd_engine.cache.blocks import BlockPool
from pd_engine.service.endpoint import Endpoint
from pd_engine.service.tombstones import Tombstones
from pd_router.attempt import Attempt
from pd_router.releases import ReleaseQueue
from pd_router.request import Submission
from pd_router.stream import TokenStream
from prefill_worker.core import PrefillCore

Plant = Callable[[pytest.MonkeyPatch], None]


def attempt_check_skipped(patch: pytest.MonkeyPatch) -> None:
    """A decode worker grants a lease to an older attempt than it has one for, and to one that has ended."""
    right = DecodeCore.reserve

    def reserve(self: DecodeCore, spec: Any) -> Any:
        journey_id = spec.key.journey_id
        for tombstones in (self._book._tombstones, self.destination._book._tombstones):
            tombstones._entries.pop(journey_id, None)
        known = self._book.newest(journey_id)
        if known is not None and known.spec.key.attempt > spec.key.attempt:
            self.ends.end(known)
            self.destination._book._tombstones._entries.pop(journey_id, None)
        return right(self, spec)

    patch.setattr(DecodeCore, "reserve", reserve)


def lost_abort(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReleaseQueue, "add", lambda self, journey_id, up_to_attempt, reason: None)


def doubled_resume(patch: pytest.MonkeyPatch) -> None:
    """An attempt that goes on after emitted tokens sends the last of them twice."""
    right = Attempt.__init__

    def init(self: Attempt, request: Any, journey: Any, **arguments: Any) -> None:
        right(self, request, journey, **arguments)
        self._token_ids += journey.stream.token_ids[-1:]

    patch.setattr(Attempt, "__init__", init)


def early_unpin(patch: pytest.MonkeyPatch) -> None:
    """A prefill worker frees blocks as soon as the first token is known."""
    right = PrefillCore._settle

    def settle(self: PrefillCore, job: Any) -> None:
        job.pinned, was_pinned = False, job.pinned
        right(self, job)
        job.pinned = was_pinned and bool(job.block_ids)

    patch.setattr(PrefillCore, "_settle", settle)


def commit_before_verified(patch: pytest.MonkeyPatch) -> None:
    """A handoff counts as complete once everything is announced."""
    patch.setattr("kv_transfer.pieces.PieceTable.is_verified", property(lambda self: self.is_announced))


def checksum_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_transfer.pull, "verify", lambda fetch, *_: np.ones(len(fetch.batch), dtype=np.bool_))


def choices_resumed_alike(patch: pytest.MonkeyPatch) -> None:
    """Every choice goes on after the tokens of the first one."""
    right = Submission.replayed
    patch.setattr(Submission, "replayed", lambda self, choice: right(self, 0))


def index_not_deduplicated(patch: pytest.MonkeyPatch) -> None:
    right = TokenStream.push

    def push(self: TokenStream, index: int, tokens: Any) -> Any:
        return right(self, max(index, len(self.tokens)), tokens)

    patch.setattr(TokenStream, "push", push)


def tombstone_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tombstones, "is_gone", lambda self, journey_id, attempt: False)


def freed_while_computing(patch: pytest.MonkeyPatch) -> None:
    """A decode worker frees the blocks of an ended choice while a step may still write to them."""
    right = ChoiceEnds.settle

    def settle(self: ChoiceEnds, record: Any) -> None:
        record.in_compute = False
        right(self, record)

    patch.setattr(ChoiceEnds, "settle", settle)


def takeover_of_unverified_blocks(patch: pytest.MonkeyPatch) -> None:
    """A next attempt counts blocks as held that were never fetched."""
    patch.setattr(LeaseRecord, "num_reusable_blocks", lambda self: self.num_prompt_blocks)


def kept_block_given_twice(patch: pytest.MonkeyPatch) -> None:
    """A cached block that is held again stays in line for eviction."""
    right = BlockPool.hold

    def hold(self: BlockPool, blocks: Any, owner: str) -> None:
        blocks = list(blocks)
        kept = dict.fromkeys(block for block in blocks if block in self._kept)
        right(self, blocks, owner)
        self._kept.update(kept)

    patch.setattr(BlockPool, "hold", hold)


def lease_not_renewed(patch: pytest.MonkeyPatch) -> None:
    """A decode worker does not tell the source that it still wants what is pinned there."""
    patch.setattr(DestinationBook, "renewals_due", lambda self, now_s: [])


def epoch_not_renewed(patch: pytest.MonkeyPatch) -> None:
    """A worker that begins another life has the epoch of the one before."""
    right = Endpoint.__init__

    def init(self: Endpoint, *, host: str, epoch: str, **arguments: Any) -> None:
        right(self, host=host, epoch=hashlib.md5(host.encode()).hexdigest(), **arguments)

    patch.setattr(Endpoint, "__init__", init)


def copy_back_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A sequence comes back from host memory without its latents."""
    patch.setattr(HostCopy, "load", lambda self, arena, block_ids, start, stop: None)


def deserted_choice_kept(patch: pytest.MonkeyPatch) -> None:
    """A decode worker goes on with what nobody reads any more."""
    patch.setattr(DecodeCore, "_is_deserted", lambda self, record, now_s: False)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """The blocks of an ended lease are free at once, whatever still writes to them."""

    def put(self: Quarantine, fetches: Mapping[int, Iterable[int]], owner: str) -> None:
        self._pool.release(list({block for blocks in fetches.values() for block in blocks}), owner)

    patch.setattr(Quarantine, "put", put)


FOUND_SOON: tuple[Plant, ...] = (
    doubled_resume, early_unpin, commit_before_verified, index_not_deduplicated,
    freed_while_computing, takeover_of_unverified_blocks, checksum_ignored, kept_block_given_twice,
    lease_not_renewed, epoch_not_renewed, copy_back_forgotten, lost_abort, deserted_choice_kept,
)
FOUND_LATER: tuple[Plant, ...] = (attempt_check_skipped, tombstone_ignored, no_quarantine, choices_resumed_alike)
