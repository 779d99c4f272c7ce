"""Handoffs over the loopback transport with planned faults: damage, stalls, late data, death."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NoReturn

import pytest

from kv_transfer.journey import JourneyKey
from kv_transfer.source import SourceEnd
from kv_transfer.transports.loopback import (
    Fault,
    FaultKind,
    FaultPlan,
    LoopbackConnection,
    LoopbackNetwork,
    LoopbackPull,
    LoopbackSource,
)
from pd_engine.errors import DataLoss, DeadlineExceeded, Internal, Unavailable
from pd_engine.sequence import FinishReason
from pd_engine.settings import TransferSettings
from support.handoffs import LAYOUT, DestinationSide, SourceSide, closing_for, new_key, running
from support.leaks import assert_nothing_left, assert_pool_is_free, until

PATIENT = TransferSettings(lease_ms=60_000, fetch_timeout_ms=60_000, max_refetches=2)
HASTY = TransferSettings(lease_ms=600, fetch_timeout_ms=300)  # where a deadline is waited for
NUM_TOKENS = 100


class Lab:
    """A source and two destinations on one loopback network."""

    def __init__(self, *faults: Fault, settings: TransferSettings = PATIENT) -> None:
        network = LoopbackNetwork()
        self.plan = FaultPlan(list(faults))
        self.source = SourceSide(settings=settings, transports=[LoopbackSource(network)])
        self.destinations = [
            DestinationSide(
                settings=settings, worker_id=f"decode-{index}",
                make_transports=lambda arena: [LoopbackPull(network, arena, self.plan)],
            )
            for index in range(2)
        ]
        self.running = running(self.source, *self.destinations)

    async def hand_over(self, num_tokens: int = NUM_TOKENS) -> None:
        """One more handoff, undisturbed: its contents are right."""
        key, destination = new_key(), self.destinations[0]
        destination.reserve_and_pull(key, num_tokens, self.source.begin(key, num_tokens))
        sent = self.source.contents(key, num_tokens)
        self.source.publish_all(key, num_tokens)
        result = await destination.result_of(key)
        assert destination.contents(result, num_tokens) == sent
        destination.free(key)

    async def settle(self) -> None:
        """Nothing is left: no block, lease, pin or quarantine."""
        for destination in self.destinations:
            for key in [key for key in destination.failed if key not in destination.expired]:
                destination.destination.release(key.journey_id, key.attempt)
            await until(lambda side=destination: side.destination.num_quarantined == 0)
            assert destination.destination.num_leases == 0
            assert_pool_is_free(destination.pool)
        await until(lambda: self.source.source.num_pins == 0)
        assert_pool_is_free(self.source.pool)


@pytest.mark.parametrize("kind", [FaultKind.NONE, FaultKind.DELAY, FaultKind.REORDER])
@pytest.mark.parametrize("at_byte", [0, 1, 5_000])
async def test_what_only_takes_longer_changes_nothing(kind: FaultKind, at_byte: int) -> None:
    lab = Lab(*[Fault(kind=kind, at_byte=at_byte) for _ in range(6)])
    async with lab.running:
        await asyncio.gather(*(lab.hand_over() for _ in range(4)))
        await lab.settle()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_damaged_piece_is_fetched_again(count: int) -> None:
    lab = Lab(*[Fault(kind=FaultKind.CORRUPT, at_byte=3_000) for _ in range(count)])
    async with lab.running:
        await lab.hand_over()
        await lab.settle()


async def test_a_piece_that_is_always_damaged_is_reported_missing_and_never_served() -> None:
    lab = Lab()
    async with lab.running:
        key, destination = new_key(), lab.destinations[0]
        for _ in range(40):
            lab.plan.add(Fault(kind=FaultKind.CORRUPT))
        destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.publish_all(key, NUM_TOKENS)
        with pytest.raises(DataLoss):
            await destination.result_of(key)
        _, missing = destination.failed[key]
        assert missing
        assert key not in destination.completed
        lab.source.source.release(key.journey_id, key.attempt)
        await lab.settle()


async def test_a_block_that_changes_owner_while_it_is_read_is_never_served() -> None:
    """`evict-while-sending`, with pins that do not hold: the source takes the block away in the middle of a copy."""
    lab = Lab()
    async with lab.running:
        key, destination, source = new_key(), lab.destinations[0], lab.source
        info = source.begin(key, NUM_TOKENS)
        victim = source.blocks[key][2]
        lab.plan.add(Fault(kind=FaultKind.CALL, at_byte=4_000, action=lambda: source.arena.renew(victim)))
        destination.reserve_and_pull(key, NUM_TOKENS, info)
        source.publish_all(key, NUM_TOKENS)
        with pytest.raises(DataLoss):
            await destination.result_of(key)
        assert 2 in destination.failed[key][1]  # and what was not verified yet when the pull ended
        source.source.release(key.journey_id, key.attempt)
        await lab.settle()


async def test_evict_while_sending() -> None:
    """The source's pool is under pressure while blocks are fetched: what is pinned stays."""
    lab = Lab(*[Fault(kind=FaultKind.DELAY, at_byte=2_000) for _ in range(20)])
    async with lab.running:
        key, destination, source = new_key(), lab.destinations[0], lab.source
        info = source.begin(key, NUM_TOKENS)
        sent = source.contents(key, NUM_TOKENS)
        destination.reserve_and_pull(key, NUM_TOKENS, info)
        source.publish_all(key, NUM_TOKENS)
        while key not in destination.completed:
            taken = source.pool.allocate(source.pool.num_free, "others")
            for block in taken:
                source.arena.piece(0, block)[:] = bytes(LAYOUT.piece_bytes(0))
            source.pool.release(taken, "others")
            await asyncio.sleep(0)
        assert destination.contents(destination.completed[key], NUM_TOKENS) == sent
        destination.free(key)
        await lab.settle()


@pytest.mark.parametrize("same_worker", [True, False])
async def test_late_data(same_worker: bool) -> None:
    """A transfer is stalled, its request is cancelled, another request needs the room, then the data arrive."""
    lab = Lab(Fault(kind=FaultKind.STALL, at_byte=1_000))
    async with lab.running:
        key, destination = new_key(), lab.destinations[0]
        destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.publish_all(key, NUM_TOKENS)
        await until(lambda: lab.plan.num_stalled == 1)
        destination.destination.release(key.journey_id, key.attempt)
        assert destination.destination.num_quarantined > 0
        other = destination if same_worker else lab.destinations[1]
        taken = other.pool.allocate(other.pool.num_free, "others")
        for component in range(len(LAYOUT.components)):
            for block in taken:
                other.arena.piece(component, block)[:] = b"\x5a" * LAYOUT.piece_bytes(component)
        lab.plan.resume()
        await until(lambda: destination.destination.num_quarantined == 0)
        for component in range(len(LAYOUT.components)):
            for block in taken:
                assert bytes(other.arena.piece(component, block)) == b"\x5a" * LAYOUT.piece_bytes(component)
        other.pool.release(taken, "others")
        assert not destination.completed
        assert not destination.failed, "nothing is told of a journey that was released"
        lab.source.source.release(key.journey_id, key.attempt)
        await lab.settle()
        await lab.hand_over()


async def test_quarantine_is_bounded() -> None:
    """A stalled transfer that never goes on is revoked: its blocks come back without it."""
    lab = Lab(Fault(kind=FaultKind.STALL))
    async with lab.running:
        key, destination = new_key(), lab.destinations[0]
        destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.publish_all(key, NUM_TOKENS)
        await until(lambda: lab.plan.num_stalled == 1)
        destination.destination.release(key.journey_id, key.attempt)
        lab.source.source.release(key.journey_id, key.attempt)
        await lab.settle()
        await lab.hand_over()


@pytest.mark.parametrize("kind", [FaultKind.STALL, FaultKind.DROP])
async def test_a_fetch_that_never_ends_costs_its_deadline(kind: FaultKind) -> None:
    lab = Lab(Fault(kind=kind, at_byte=100), settings=HASTY)
    async with lab.running:
        key, destination = new_key(), lab.destinations[0]
        destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.publish_all(key, NUM_TOKENS)
        with pytest.raises(DeadlineExceeded):
            await destination.result_of(key)
        lab.source.source.release(key.journey_id, key.attempt)
        await lab.settle()


@pytest.mark.parametrize("at_byte", [0, 1, 1_000, 9_999, 50_000])
async def test_a_source_that_dies_at_a_byte(at_byte: int) -> None:
    lab = Lab(Fault(kind=FaultKind.KILL, at_byte=at_byte))
    async with lab.running:
        key, destination = new_key(), lab.destinations[0]
        destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.publish_all(key, NUM_TOKENS)
        with pytest.raises(Unavailable):
            await destination.result_of(key)
        lab.source.source.release(key.journey_id, key.attempt)
        await lab.settle()
        await lab.hand_over()


async def test_what_was_verified_is_not_sent_again() -> None:
    """An attempt breaks half way; the next one, from another source, sends the rest."""
    network = LoopbackNetwork()
    other = SourceSide(seed=1, worker_id="prefill-1", settings=PATIENT, transports=[LoopbackSource(network)])
    destination = DestinationSide(settings=PATIENT, make_transports=lambda arena: [LoopbackPull(network, arena)])
    first = SourceSide(seed=1, settings=PATIENT, transports=[LoopbackSource(network)])
    async with running(first, other, destination):
        key = new_key()
        info = first.begin(key, NUM_TOKENS)
        sent = first.contents(key, NUM_TOKENS)
        destination.reserve_and_pull(key, NUM_TOKENS, info)
        for component in range(len(LAYOUT.components)):
            first.source.publish(key, component, 50)
        book = destination.destination._book
        await until(lambda: book.get(key).pieces is not None and len(book.get(key).missing_blocks()) == 4)
        first.source.fail(key, Unavailable("out of memory"))
        with pytest.raises(Unavailable, match="out of memory"):
            await destination.result_of(key)
        assert destination.failed[key][1] == (3, 4, 5, 6)
        again = type(key)(key.journey_id, 2)
        lease = destination.destination.reserve(again, num_tokens=NUM_TOKENS, num_blocks=7)
        assert lease.num_held_blocks == 3
        info = other.begin(again, NUM_TOKENS, num_held_blocks=3)
        destination.destination.pull(again, lease.lease_id, info)
        other.publish_all(again, NUM_TOKENS)
        result = await destination.result_of(again)
        assert result.num_bytes == (NUM_TOKENS - 48) * LAYOUT.bytes_per_token
        assert destination.contents(result, NUM_TOKENS) == sent
        destination.free(again)
        await until(lambda: other.source.num_pins == 0)
        assert_pool_is_free(destination.pool)
        assert first.ended == [(key, SourceEnd.FAILED)]
        assert other.ended == [(again, SourceEnd.COMMITTED)]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_first_token_that_ends_the_request_is_no_loss(is_late: bool) -> None:
    """Whoever fetches then, or begins to, is told so; the pins last until it has been."""
    lab = Lab()
    async with lab.running:
        key, source, destination = new_key(), lab.source, lab.destinations[0]
        info = source.begin(key, NUM_TOKENS)
        if not is_late:
            destination.reserve_and_pull(key, NUM_TOKENS, info)
        source.source.publish(key, 0, NUM_TOKENS)
        source.source.finish(key, replace(closing_for(NUM_TOKENS), finish_reason=FinishReason.STOP))
        book = source.source._book
        await until(lambda: (handoff := book.get(key)) is None or handoff.closing is not None)
        if is_late:
            destination.reserve_and_pull(key, NUM_TOKENS, info)
        result = await destination.result_of(key)
        assert (result.closing.finish_reason, result.block_ids) == (FinishReason.STOP, ())
        await until(lambda: bool(source.ended))
        assert source.ended == [(key, SourceEnd.COMMITTED)]
        await lab.settle()


async def test_cancel_anywhere() -> None:
    await _cancel_anywhere(40)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_cancel_anywhere_a_thousand_times() -> None:
    await _cancel_anywhere(1_000)


async def _cancel_anywhere(count: int) -> None:
    """The client leaves at some byte of the handoff; the next request succeeds and nothing has leaked."""
    async with assert_nothing_left():
        await _cancel_each(count)


async def _cancel_each(count: int) -> None:
    lab = Lab()
    source, destination = lab.source, lab.destinations[0]
    total = NUM_TOKENS * LAYOUT.bytes_per_token
    async with lab.running:
        for number in range(count):
            key = new_key()

            def leave(key: JourneyKey = key) -> None:
                destination.destination.release(key.journey_id, key.attempt)
                source.source.release(key.journey_id, key.attempt)

            lab.plan.add(Fault(kind=FaultKind.CALL, at_byte=number * total // count, action=leave))
            destination.reserve_and_pull(key, NUM_TOKENS, source.begin(key, NUM_TOKENS))
            source.publish_all(key, NUM_TOKENS)
            await until(lambda key=key: (key, SourceEnd.RELEASED) in source.ended)
            await lab.settle()
        await lab.hand_over()
        await lab.settle()


async def test_a_check_that_fails_breaks_its_pull_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for want of memory or of a thread, in the midst of a handoff whose source lives and answers."""
    lab = Lab()
    async with lab.running:
        destination = lab.destinations[0]

        def fail(*arguments: object) -> NoReturn:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(destination.destination._desk, "_checksums", fail)
            key = new_key()
            destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
            lab.source.publish_all(key, NUM_TOKENS)
            with pytest.raises(Internal, match="MemoryError"):
                await destination.result_of(key)
        lab.source.source.release(key.journey_id, key.attempt)
        await lab.settle()
        await lab.hand_over()


async def test_a_fetch_of_which_nobody_knows_how_it_ended_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks would never come back."""
    lab = Lab(Fault(kind=FaultKind.KILL))
    crashes: list[Exception] = []
    lab.destinations[0].destination._on_crash = crashes.append

    async def fail(connection: LoopbackConnection) -> NoReturn:
        raise ValueError("not ready")

    monkeypatch.setattr(LoopbackConnection, "quiesce", fail)
    async with lab.running:
        key = new_key()
        lab.destinations[0].reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.publish_all(key, NUM_TOKENS)
        await until(lambda: bool(crashes))
    assert str(crashes[0]) == "not ready"
