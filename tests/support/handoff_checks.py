"""What must hold in a `World` after every step, and at its end."""

from __future__ import annotations

import math

from kv_transfer.source_state import MARGIN_S
from support import handoff_network as network
from support.handoff_prefixes import MAX_HOLDS
from support.handoff_sides import Destination, Source
from support.handoff_world import LEASE_S, World


def check(world: World) -> None:
    for side in [*world.sources, *world.destinations]:
        side.pool.check_integrity()
        for name in side.strangers:
            side.check_stranger(name)
    for source in world.sources:
        _check_pins(world, source)
    for destination in world.destinations:
        _check_leases(world, destination)
    assert world.num_wrong_without_fault == 0, "a pinned, undamaged piece was found wrong: its pins ended too early"


def drain(world: World) -> None:
    """Everything that is still under way ends, and nothing is left of it."""
    for transfer in list(world.transfers):
        network.fail(world, transfer)
        network.quiesce(world, transfer)
    world.advance(10 * (LEASE_S + MARGIN_S), hears=False)
    check(world)
    for source in world.sources:
        assert source.book.num_pins == 0 and not source.blocks
    for destination in world.destinations:
        assert destination.book.num_leases == 0 and destination.book.num_quarantined == 0
        assert destination.book.num_bytes_in_flight == 0
        for key in list(destination.running):
            world.end_running(destination, key)
    for side in [*world.sources, *world.destinations]:
        for name in list(side.strangers):
            side.end_stranger(name)
        assert side.pool.num_free == side.pool.num_blocks, side.pool.holdings()


def _check_pins(world: World, source: Source) -> None:
    live = set(source.book.live_keys())
    source.cache.check_integrity()
    assert len(source.holds) <= MAX_HOLDS and set(source.holds) <= live
    assert source.holder.num_pinned_blocks == sum(len(source.blocks[key]) for key in source.holds)
    assert live == set(source.blocks), "pins and blocks differ"
    for key, blocks in source.blocks.items():
        handoff = source.book.get(key)
        assert handoff is not None and handoff.deadline_s > world.now_s - 1e-9, f"{key} has outlived its lease"
        assert handoff.deadline_s <= handoff.last_deadline_s, f"the pins of {key} were made longer"
        assert all(key.owner in source.pool.owners(block) for block in blocks)


def _check_leases(world: World, destination: Destination) -> None:
    """Each lease owns what it will write to alone, whatever it shares as held."""
    in_use = {block for blocks in destination.running.values() for block in blocks}
    for key in destination.book.live_keys():
        lease = destination.book.get(key)
        assert lease is not None and lease.deadline_s > world.now_s - 1e-9, f"{key} has outlived its deadline"
        until_s = world.held_until_s.get(key, math.inf)
        assert not lease.is_prefix or lease.deadline_s <= until_s + 1e-3, f"{key} counts on pins that may have ended"
        assert all(key.owner in destination.pool.owners(block) for block in lease.block_ids)
        for block in lease.block_ids[lease.num_held_blocks :]:
            assert destination.pool.owners(block) == (key.owner,), f"{key} shares block {block}"
            assert block not in in_use, "a leased block is also a running sequence's"
