"""The books of both sides in single steps: what the state machines' tables say, and who takes turns."""

from __future__ import annotations

import pytest

from kv_transfer import destination_state, source_state
from kv_transfer.destination_book import DestinationBook
from kv_transfer.destination_state import Broke, Ended, LeaseEvent, LeaseRecord, LeaseState
from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import Closing
from kv_transfer.source_book import SourceBook
from kv_transfer.source_state import MARGIN_S, SourceEvent, SourceHandoff, SourceState
from pd_engine.cache.blocks import BlockPool
from pd_engine.errors import AlreadyExists, Gone, InvalidArgument, ResourceExhausted
from support import handoff_network as network
from support import handoff_prefixes as prefixes
from support.handoff_checks import check, drain
from support.handoff_prompt import PAGED
from support.handoff_world import LEASE_S, World

JOURNEY = "a" * 32


def handoff(attempt: int = 1, num_tokens: int = 8) -> SourceHandoff:
    return SourceHandoff(
        key=JourneyKey(JOURNEY, attempt), token=f"{attempt:032x}", block_ids=(1, 2), generations=(0, 0),
        num_tokens=num_tokens, num_held_blocks=0, deadline_s=10.0,
    )


def lease(state: LeaseState) -> LeaseRecord:
    return LeaseRecord(
        key=JourneyKey(JOURNEY, 1), lease_id="l", lease_ms=1, num_tokens=1, num_prompt_blocks=1, num_held_blocks=0,
        block_ids=(0,), deadline_s=1.0, state=state,
    )


@pytest.mark.parametrize("state", SourceState)
@pytest.mark.parametrize("event", SourceEvent)
def test_a_transition_that_is_not_in_the_sources_table_raises(state: SourceState, event: SourceEvent) -> None:
    made = handoff()
    made.state = state
    following = source_state.TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(AssertionError, match=f"{event.value} is not possible in state {state.value}"):
            made.apply(event)
    else:
        made.apply(event)
        assert made.state is following


@pytest.mark.parametrize("state", LeaseState)
@pytest.mark.parametrize("event", LeaseEvent)
def test_a_transition_that_is_not_in_the_leases_table_raises(state: LeaseState, event: LeaseEvent) -> None:
    made = lease(state)
    following = destination_state.TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(AssertionError, match=f"{event.value} is not possible in state {state.value}"):
            made.apply(event)
    else:
        made.apply(event)
        assert made.state is following


def test_live_states_are_those_that_can_end() -> None:
    assert {s for s in SourceState if source_state.TRANSITIONS[s]} == {SourceState.PUBLISHING, SourceState.CLOSED}
    assert {s for s in LeaseState if destination_state.TRANSITIONS[s]} == {s for s in LeaseState if lease(s).is_live}


def test_begin_is_idempotent_and_attempts_only_rise() -> None:
    book = SourceBook("e" * 32)
    first = book.begin(handoff(2), 0.0)
    assert book.begin(handoff(2), 1.0) is first
    with pytest.raises(AlreadyExists):
        book.begin(handoff(2, num_tokens=7), 1.0)
    with pytest.raises(Gone):
        book.begin(handoff(1), 1.0)
    second = book.begin(handoff(3), 1.0)
    assert book.take_ended() == [first]
    assert first.state is SourceState.SUPERSEDED
    assert book.get(second.key) is second
    assert book.num_pins == 1


def test_a_release_that_comes_first_leaves_a_tombstone() -> None:
    book = SourceBook("e" * 32)
    book.release(JOURNEY, 2, 0.0)
    with pytest.raises(Gone):
        book.begin(handoff(2), 1.0)
    assert book.begin(handoff(3), 1.0).is_live


def test_a_token_names_one_handoff_and_ends_with_it() -> None:
    book = SourceBook("e" * 32)
    made = book.begin(handoff(), 0.0)
    assert book.present(made.key, made.token) is made
    with pytest.raises(Gone):
        book.present(JourneyKey("b" * 32, 1), made.token)
    book.release(JOURNEY, 1, 0.0)
    assert book.by_token(made.token) is None
    with pytest.raises(Gone):
        book.commit(made.key, made.token, 0.0)


def test_reserve_is_idempotent_and_takes_all_or_nothing() -> None:
    pool = BlockPool(4)
    book = DestinationBook(PAGED, pool, max_bytes_in_flight=100, max_refetches=1)

    def reserve(journey: str, attempt: int, num_blocks: int) -> LeaseRecord:
        return book.reserve(
            JourneyKey(journey, attempt), lease_id="l", lease_ms=1_000, num_tokens=4, num_blocks=num_blocks,
            held_block_ids=(), now_s=0.0,
        )

    first = reserve(JOURNEY, 1, 3)
    assert reserve(JOURNEY, 1, 3) is first
    with pytest.raises(ResourceExhausted):
        reserve("b" * 32, 1, 2)
    assert pool.num_free == 1
    with pytest.raises(ResourceExhausted):
        reserve(JOURNEY, 2, 5)
    assert pool.num_free == 4, "a takeover that finds no room leaves nothing"
    with pytest.raises(Gone):
        reserve(JOURNEY, 1, 3)
    assert reserve(JOURNEY, 2, 4).key.attempt == 2
    pool.check_integrity()


def started(world: World, num_tokens: int = 20, *, source: int = 0) -> JourneyKey:
    """A handoff whose pieces are all announced."""
    key = JourneyKey(world.new_journey(num_tokens), 1)
    world.reserve(key, 0)
    world.begin(key, source)
    world.pull(key)
    world.compute_all(world.sources[source].jobs[key])
    for _ in range(4):
        network.deliver(world, next(stream for stream in world.streams if stream.lease.key == key))
    return key


def test_handoffs_take_turns() -> None:
    world = World()
    keys = [started(world, 8) for _ in range(3)]
    book = world.destinations[0].book
    order = []
    for _ in range(3):
        fetch = book.next_fetch()
        assert fetch is not None
        order.append(fetch.lease.key)
        book.quiesced(fetch)
    assert order == keys, "each once before anyone twice"
    world.dispose()


def test_a_stalled_source_leaves_room_for_others() -> None:
    """However many handoffs it has, and although none of its fetches ends."""
    world = World()
    for _ in range(3):
        started(world, 8)
    book = world.destinations[0].book
    stalled = list(iter(book.next_fetch, None))
    assert stalled
    key = started(world, 8, source=1)
    fetch = book.next_fetch()
    assert fetch is not None
    assert fetch.lease.key == key
    for each in (*stalled, fetch):
        book.quiesced(each)
    assert book.num_bytes_in_flight == 0
    world.dispose()


def test_a_closing_before_everything_was_announced_is_refused() -> None:
    world = World()
    key = JourneyKey(world.new_journey(8), 1)
    world.reserve(key, 0)
    world.begin(key, 0)
    world.pull(key)
    stream = world.streams[0]
    network.deliver(world, stream)
    closing = Closing(first_token_id=1, num_prompt_tokens=8)
    with pytest.raises(InvalidArgument, match="before every piece was announced"):
        world.destinations[0].book.closed(stream.lease, closing, world.now_s)
    world.dispose()


def test_a_silent_source_breaks_the_pull_and_a_silent_router_ends_the_lease() -> None:
    world = World()
    key = started(world)
    book = world.destinations[0].book
    world.now_s += 0.9 * LEASE_S
    assert book.renew(key, world.now_s)
    world.now_s += 0.2 * LEASE_S
    book.tick(world.now_s)
    assert [type(news) for news in book.take_news()] == [Broke]
    assert book.num_leases == 1, "the router has vouched for it"
    world.now_s += LEASE_S
    book.tick(world.now_s)
    [ended] = book.take_news()
    assert isinstance(ended, Ended)
    assert ended.lease.state is LeaseState.EXPIRED
    assert book.num_leases == 0
    world.dispose()


def test_a_destination_dies_while_it_pulls_a_prefix() -> None:
    """Its lease stays as it was; the pins end at their own deadline, after the lease's, and not before."""
    world = World()
    source, destination = world.sources[0], world.destinations[1]
    prefixes.keep(world, source, world.prompts[world.new_journey(16)])
    key = prefixes.hold(world, source, world.kept[0][1], destination)
    assert key is not None
    world.advance(0.5 * LEASE_S)
    prefixes.pull(world, world.held[0])
    network.deliver(world, world.streams[0])
    lease = world.leases[key][1]
    world.restart_destination(1)
    world.advance(lease.deadline_s + 0.9 * MARGIN_S - world.now_s)
    check(world)
    assert source.book.live_keys() == [key], "the margin has not passed"
    world.advance(0.2 * MARGIN_S)
    check(world)
    assert lease.state is LeaseState.PULLING, "nobody is left to end it"
    assert source.book.num_pins == 0
    drain(world)
    world.dispose()
