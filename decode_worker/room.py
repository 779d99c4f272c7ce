"""Finds running sequences their blocks, one step ahead: `preemption` decides, this does it and keeps the books of it.

A sequence that leaves goes LEAVING, AWAY, RETURNING and is DECODING again; it keeps its router's stream all the while.
Who has what: in LEAVING and RETURNING the compute thread has its copy, in AWAY its record has, and an end closes it
there. Blocks are given back when the copy is complete, those that are shared too: what the prefix cache still has when
it returns is held again, the rest is copied.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from decode_worker.blocks import ChoiceBlocks
from decode_worker.choice_state import LEASED, PREEMPTED, ChoiceRecord, ChoiceState, ReserveSpec
from decode_worker.host_tier import Stored
from decode_worker.preemption import (
    LOOKAHEAD_STEPS,
    QUIET_STEPS,
    Away,
    Plan,
    Resident,
    Snapshot,
    make_plan,
    num_slots_ahead,
)
from decode_worker.reservation import Room, num_slots
from decode_worker.runner import DecodeRunner
from decode_worker.scheduler import Place
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.chain import Chain
from pd_engine.cache.layout import CacheLayout
from pd_engine.priority import due_s

log = logging.getLogger(__name__)


class RoomKeeper:
    """Belongs to the event loop's thread.

    Args:
        num_host_blocks: that the host tier may hold.
        post: runs a command in the compute thread between two steps.

    Attributes:
        num_moves: sequences that were moved to host memory, in this life of the worker.
        num_recomputed: that were given up because the host tier or the blocks of leases were needed.
    """

    def __init__(
        self, *, pool: BlockPool, blocks: ChoiceBlocks, layout: CacheLayout, num_host_blocks: int, max_batch: int,
        runner: DecodeRunner, post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._pool = pool
        self._blocks = blocks
        self._layout = layout
        self._num_host_blocks = num_host_blocks
        self._max_batch = max_batch
        self._runner = runner
        self._post = post
        self._arrivals = itertools.count()
        self._host: dict[str, ChoiceRecord] = {}  # who has blocks of the host tier
        self.num_moves = 0
        self.num_recomputed = 0

    @property
    def num_preempted(self) -> int:
        """Sequences on their way to host memory, there, or on their way back."""
        return sum(record.state in PREEMPTED for record in self._host.values())

    @property
    def host_bytes(self) -> int:
        """Of the host tier, taken or about to be."""
        return self._num_host_blocks_taken * self._layout.block_bytes

    def arrive(self, record: ChoiceRecord, now_s: float) -> Place:
        """It has come, with a lease, and again when its blocks are its own. Returns its place among all."""
        record.place = Place(
            priority=record.spec.priority, due_s=due_s(now_s, record.deadline_s), arrival=next(self._arrivals),
            deadline_s=record.deadline_s,
        )
        return record.place

    def room_for(
        self, spec: ReserveSpec, known: ChoiceRecord | None, chain: Chain | None, sequences: Sequence[ChoiceRecord], *,
        projected_tokens: int, itl_ms: float,
    ) -> Room:
        """What a reservation sees.

        Args:
            known: an earlier attempt of the journey: its lease is taken over.
            chain: of the choice, as the prefix cache knows it.
            sequences: all that have begun.
        """
        has_lease = known is not None and known.state in LEASED
        own = known.lease_block_ids if known is not None and has_lease else ()
        return Room(
            block_size=self._layout.block_size,
            num_free_blocks=self._blocks.num_available(spec, chain, own),
            num_blocks=self._pool.num_blocks,
            num_spoken_for_blocks=0 if has_lease else self.num_blocks_spoken_for(sequences),
            num_preempted=0 if has_lease else self.num_preempted,
            projected_tokens=projected_tokens,
            min_remaining_tokens=min((record.num_remaining for record in sequences), default=None),
            itl_ms=itl_ms,
        )

    def num_blocks_spoken_for(self, records: Iterable[ChoiceRecord]) -> int:
        """Blocks that sequences will want soon."""
        return sum(
            max(0, self._num_blocks(each, QUIET_STEPS) - len(each.block_ids)) for each in records if _is_resident(each)
        )

    def supply(self, sequences: Sequence[ChoiceRecord], others: Iterable[ChoiceRecord]) -> list[ChoiceRecord]:
        """Gives sequences the blocks that they want next, makes room for them, or brings back who waits.

        Args:
            sequences: all that were handed over and whose blocks or copies are not given back yet, in order of their
                places.
            others: those whose lease may be revoked are among them, in the order in which they are to be kept.

        Returns:
            Who is to be given up.
        """
        missing = {each.name: self._num_missing(each) for each in sequences if each.state is ChoiceState.DECODING}
        is_away = any(each.state is ChoiceState.AWAY for each in sequences)
        if not is_away and sum(missing.values()) <= self._pool.num_free:
            plan = Plan(grants={name: count for name, count in missing.items() if count})
        else:
            plan = make_plan(self._snapshot(sequences, others))
        by_name = {each.name: each for each in sequences}
        for name, count in plan.grants.items():
            self._grant(by_name[name], count)
        for name in plan.leave:
            self._move_out(by_name[name])
        for name, count in plan.come_back.items():
            self._bring_back(by_name[name], count)
        given_up = [*(by_name[name] for name in plan.recompute), *(each for each in others if each.name in plan.revoke)]
        self.num_recomputed += len(given_up)
        return given_up

    def on_moved_out(self, record: ChoiceRecord | None, stored: Stored) -> None:
        """Its latents are in host memory: its blocks are free."""
        if record is None or record.state is not ChoiceState.LEAVING:
            stored.copy.close()
            return
        record.move(ChoiceState.AWAY)
        record.num_moves += 1
        self.num_moves += 1
        record.in_compute = False
        record.stored = stored
        record.num_host_blocks = stored.copy.num_blocks
        self._blocks.release(record)

    def on_moved_back(self, record: ChoiceRecord | None) -> None:
        if record is None or record.state is not ChoiceState.RETURNING:
            return
        record.move(ChoiceState.DECODING)
        record.num_generated_before = record.num_generated
        self._leave_host(record)
        self._blocks.came_back(record)

    def on_ended(self, record: ChoiceRecord) -> None:
        """The compute thread has let go of it: what it had in host memory is given back."""
        if record.stored is not None:
            record.stored.copy.close()
            record.stored = None
        self._leave_host(record)

    # Doing it

    def _grant(self, record: ChoiceRecord, count: int) -> None:
        fresh = self._blocks.extend(record, count)
        self._post(lambda: self._runner.grant(record.name, fresh))

    def _move_out(self, record: ChoiceRecord) -> None:
        log.info("%s leaves for host memory: %d blocks", record.name, len(record.block_ids))
        record.move(ChoiceState.LEAVING)
        record.num_host_blocks = len(record.block_ids)
        self._host[record.name] = record
        self._post(lambda: self._runner.move_out(record.name))

    def _bring_back(self, record: ChoiceRecord, count: int) -> None:
        stored = record.stored
        assert stored is not None, record.name
        num_held = self._blocks.take_back(record, count)
        log.info("%s comes back: %d blocks, %d of them cached", record.name, count, num_held)
        record.move(ChoiceState.RETURNING)
        record.stored = None
        record.in_compute = True
        block_ids = list(record.block_ids)
        self._post(lambda: self._runner.bring_back(stored, block_ids, num_held))

    def _leave_host(self, record: ChoiceRecord) -> None:
        record.num_host_blocks = 0
        self._host.pop(record.name, None)

    # As a plan sees it

    @property
    def _num_host_blocks_taken(self) -> int:
        return sum(record.num_host_blocks for record in self._host.values())

    def _snapshot(self, sequences: Sequence[ChoiceRecord], others: Iterable[ChoiceRecord]) -> Snapshot:
        on_their_way = [each for each in sequences if each.state in (ChoiceState.LEAVING, ChoiceState.ENDED)]
        leased = [each for each in others if each.state in LEASED]
        return Snapshot(
            num_free_blocks=self._pool.num_free,
            num_coming_blocks=self._pool.num_quarantined
            + sum(self._blocks.num_freed(each.block_ids) for each in on_their_way),
            num_host_blocks_free=self._num_host_blocks - self._num_host_blocks_taken,
            residents=[self._resident(each) for each in sequences if _is_resident(each)],
            away=[self._away(each) for each in sequences if each.state is ChoiceState.AWAY],
            leases=[(each.name, self._blocks.num_freed(each.lease_block_ids)) for each in reversed(leased)],
            max_batch=self._max_batch,
        )

    def _resident(self, record: ChoiceRecord) -> Resident:
        before = record.num_generated_before
        return Resident(
            name=record.name,
            place=record.place,
            num_blocks=len(record.block_ids),
            num_freed_blocks=self._blocks.num_freed(record.block_ids),
            num_wanted_blocks=self._num_blocks(record, LOOKAHEAD_STEPS),
            num_quiet_blocks=self._num_blocks(record, QUIET_STEPS),
            may_leave=record.state is ChoiceState.DECODING
            and (before is None or record.num_generated - before >= QUIET_STEPS),
        )

    def _away(self, record: ChoiceRecord) -> Away:
        return Away(
            name=record.name, place=record.place, num_shared_blocks=self._blocks.num_shared(record),
            num_wanted_blocks=self._num_blocks(record, LOOKAHEAD_STEPS),
            num_quiet_blocks=self._num_blocks(record, QUIET_STEPS),
        )

    def _num_missing(self, record: ChoiceRecord) -> int:
        return max(0, self._num_blocks(record, LOOKAHEAD_STEPS) - len(record.block_ids))

    def _num_blocks(self, record: ChoiceRecord, num_steps: int) -> int:
        choice = record.spec.choice
        return self._layout.num_blocks_for(
            num_slots_ahead(
                record.num_tokens, num_steps, num_drafts=choice.speculate, num_slots=num_slots(choice)
            )
        )


def _is_resident(record: ChoiceRecord) -> bool:
    return record.state in (ChoiceState.DECODING, ChoiceState.RETURNING)
