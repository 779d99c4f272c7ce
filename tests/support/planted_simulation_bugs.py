"""Bugs to plant into production classes, of kinds that were made somewhere before: the simulation must find each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kv_transfer.pull
from decode_worker.core import DecodeCore
from decode_worker.host_tier import Mover
from decode_worker.silence import RouterWatch
from decode_worker.tokens_hub import TokensHub
from kv_transfer.destination_book import DestinationBook
from kv_transfer.destination_state import LeaseRecord
from kv_transfer.pull import PullDesk
from kv_transfer.quarantine import Quarantine
from pd_engine.cache.blocks import BlockPool
from pd_engine.service.endpoint import Endpoint
from pd_engine.service.tombstones import Tombstones
from pd_router.attempt import Attempt
from pd_router.journey import TAKES_TOKENS, Journey
from pd_router.link import WorkerLink
from pd_router.releases import ReleaseQueue
from pd_router.stream import TokenStream
from prefill_worker.core import PrefillCore

Plant = Callable[[pytest.MonkeyPatch], None]


def attempt_check_skipped(patch: pytest.MonkeyPatch) -> None:
    """A decode worker grants a lease to an older attempt than it has one for, and to one that has ended."""
    right = DecodeCore.reserve

    def reserve(self: DecodeCore, spec: Any) -> Any:
        journey_id = spec.key.journey_id
        for tombstones in (self._tombstones, self.destination._book._tombstones):
            tombstones._entries.pop(journey_id, None)
        known = self._records.get(journey_id)
        if known is not None and known.spec.key.attempt > spec.key.attempt:
            self._end(known)
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


def epoch_not_renewed(patch: pytest.MonkeyPatch) -> None:
    """A worker that is started anew says that it is the one that was there before."""
    right = Endpoint.__init__

    def init(self: Endpoint, *, host: str, **arguments: Any) -> None:
        right(self, host=host, **{**arguments, "epoch": host.encode().hex().ljust(32, "0")[:32]})

    patch.setattr(Endpoint, "__init__", init)


def commit_before_verified(patch: pytest.MonkeyPatch) -> None:
    """A handoff counts as complete once everything is announced."""
    patch.setattr("kv_transfer.pieces.PieceTable.is_verified", property(lambda self: self.is_announced))


def checksum_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_transfer.pull, "verify", lambda fetch, *_: np.ones(len(fetch.batch), dtype=np.bool_))


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    def put(self: Quarantine, fetches: dict[int, tuple[int, ...]], owner: str) -> None:
        self._pool.release(sorted(set().union(*fetches.values())), owner)

    patch.setattr(Quarantine, "put", put)


def index_not_deduplicated(patch: pytest.MonkeyPatch) -> None:
    right = TokenStream.push

    def push(self: TokenStream, index: int, tokens: Any) -> Any:
        return right(self, max(index, len(self.tokens)), tokens)

    patch.setattr(TokenStream, "push", push)


def lease_not_renewed(patch: pytest.MonkeyPatch) -> None:
    async def renew(self: Any, *arguments: Any) -> None:
        await asyncio.Event().wait()

    patch.setattr(PullDesk, "renew", renew)
    patch.setattr(WorkerLink, "_renew", renew)


def tombstone_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tombstones, "is_gone", lambda self, journey_id, attempt: False)


def freed_while_computing(patch: pytest.MonkeyPatch) -> None:
    """A decode worker frees the blocks of an ended choice while a step may still write to them."""
    right = DecodeCore._settle

    def settle(self: DecodeCore, record: Any) -> None:
        record.in_compute = False
        right(self, record)

    patch.setattr(DecodeCore, "_settle", settle)


def takeover_of_unverified_blocks(patch: pytest.MonkeyPatch) -> None:
    """A next attempt counts blocks as held that were never fetched."""
    patch.setattr(LeaseRecord, "num_reusable_blocks", lambda self: self.num_prompt_blocks)


def deserted_choices_go_on(patch: pytest.MonkeyPatch) -> None:
    """A decode worker never ends what nobody reads."""
    patch.setattr(RouterWatch, "is_silent", lambda self, router_id, **_: False)


def copy_back_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A sequence that returns from host memory finds its blocks as they were left."""
    right = Mover._copy

    def copy(self: Mover, move: Any, stop: int) -> None:
        if move.is_out:
            right(self, move, stop)
        move.num_done = stop

    patch.setattr(Mover, "_copy", copy)


def new_stream_begins_empty(patch: pytest.MonkeyPatch) -> None:
    """A router that reconnects is told only what comes from then on."""
    right = TokensHub.subscribe

    def subscribe(self: TokensHub, router_id: str) -> Any:
        stories, self._stories = self._stories, {}
        try:
            return right(self, router_id)
        finally:
            self._stories = stories

    patch.setattr(TokensHub, "subscribe", subscribe)


def silent_source_never_breaks(patch: pytest.MonkeyPatch) -> None:
    """A pull waits for ever for a source that says nothing, and its lease with it."""
    def tick(self: DestinationBook, now_s: float) -> None:
        self._tombstones.tick(now_s)

    patch.setattr(DestinationBook, "tick", tick)


def old_attempt_continues(patch: pytest.MonkeyPatch) -> None:
    """Tokens of any attempt are taken, whatever the journey is doing."""
    def take_tokens(self: Journey, attempt: int, index: int, tokens: Any) -> Any:
        chunk = self.stream.push(index, tokens)
        if self.stream.end is not None or self.state in TAKES_TOKENS:
            return right(self, self.attempt, index, tokens) or chunk
        return chunk

    right = Journey.take_tokens
    patch.setattr(Journey, "take_tokens", take_tokens)


def kept_block_given_twice(patch: pytest.MonkeyPatch) -> None:
    """A cached block that is held again stays in line for eviction."""
    right = BlockPool.hold

    def hold(self: BlockPool, blocks: Any, owner: str) -> None:
        blocks = list(blocks)
        kept = dict.fromkeys(block for block in blocks if block in self._kept)
        right(self, blocks, owner)
        self._kept.update(kept)

    patch.setattr(BlockPool, "hold", hold)


FOUND_SOON: tuple[Plant, ...] = (
    attempt_check_skipped, doubled_resume, early_unpin, commit_before_verified, index_not_deduplicated,
    tombstone_ignored, freed_while_computing, takeover_of_unverified_blocks, no_quarantine,
)
FOUND_LATER: tuple[Plant, ...] = (
    lost_abort, checksum_ignored, lease_not_renewed, epoch_not_renewed, deserted_choices_go_on, copy_back_forgotten,
    new_stream_begins_empty, silent_source_never_breaks, old_attempt_continues, kept_block_given_twice,
)
