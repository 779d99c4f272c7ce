"""Prefix caches of both workers: the tokens of one process, exactly the bytes that were not there, exact counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument
from pd_engine.generate import Generation, generate
from pd_engine.hashing import block_hashes
from pd_engine.service.client import typed_error
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import SECRET, local_workers, worker_processes
from support.demo_requests import TEXT, check_equal, message, params
from support.player import CALL_TIMEOUT_S, Copy, Player, new_journey

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 8, "chunk_tokens": 64}, "decode": {"adaptive_speculation": False},
    "transfer": {"lease_ms": 60_000},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Player]:
    log_dir: Path = tmp_path_factory.mktemp("workers")
    async with worker_processes(SETTINGS, log_dir) as ([prefill], [decode]):
        player = Player(prefill.address, decode.address, SECRET)
        await player.open()
        yield player
        await player.until_idle()
        await player.close()


def check_moved(copy: Copy, engine: Engine, expected: Generation, *, num_tokens: int, num_held_blocks: int) -> None:
    """Exactly the slots that were not held have moved, with the bits of one process."""
    assert copy.handoff is not None
    assert copy.handoff.bytes == (num_tokens - num_held_blocks * BLOCK) * engine.layout.bytes_per_token
    num_blocks = -(-num_tokens // BLOCK)
    for place, checksum in enumerate(copy.handoff.block_checksums):
        wanted = 0 if place % num_blocks < num_held_blocks else expected.prompt_checksums[place]
        assert checksum == wanted, (place, num_blocks)


@pytest.mark.parametrize("num_cached", [15, 16, 17, 32, 47, 48, 49])
@pytest.mark.parametrize("speculate", [0, 1])
async def test_a_prompt_whose_beginning_is_cached(
    player: Player, engine: Engine, tokenizer: Tokenizer, num_cached: int, speculate: int
) -> None:
    """Cached and new parts of every size around the edges of blocks; cached whole; longer than what is cached."""
    ids, salt = tokenizer.encode(TEXT)[:49], f"{num_cached} {speculate}"
    await player.run(ids[:num_cached], message(tokenizer, params(1), speculate), cached=True, salt=salt)
    for length in (48, 49):
        asked = params(10, seed=length)
        copy = await player.run(ids[:length], message(tokenizer, asked, speculate), cached=True, salt=salt)
        expected = generate(engine, tokenizer, ids[:length], asked, speculate=speculate, checksums=True)
        check_equal(copy, expected)
        num_blocks = num_cached // BLOCK if length == 48 else 3
        assert copy.cached_tokens == num_blocks * BLOCK
        check_moved(copy, engine, expected, num_tokens=length, num_held_blocks=num_blocks if length == 49 else 0)
        assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    await player.until_idle()


@pytest.mark.parametrize("speculate", [0, 1, 3])
async def test_the_next_turn_moves_only_what_is_new(
    player: Player, engine: Engine, tokenizer: Tokenizer, speculate: int
) -> None:
    """Prompts and answers are at the decode worker, but for the slot of an answer's last token; the prefill worker has
    the prompts alone."""
    text, salt = tokenizer.encode(TEXT), f"turns {speculate}"
    ids, num_cached, num_held = text[:40], 0, 0
    for turn in range(3):
        asked = params(21, seed=turn)
        copy = await player.run(ids, message(tokenizer, asked, speculate), cached=True, salt=salt)
        expected = generate(engine, tokenizer, ids, asked, speculate=speculate, checksums=True)
        check_equal(copy, expected)
        assert copy.cached_tokens == num_cached
        assert copy.handoff is not None
        assert copy.handoff.cached_tokens == num_cached
        check_moved(copy, engine, expected, num_tokens=len(ids), num_held_blocks=num_held)
        assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
        num_cached, num_held = len(ids) // BLOCK * BLOCK, (len(ids) + 21 - 1) // BLOCK
        ids = [*ids, *copy.token_ids, *text[40:47]]
    await player.until_idle()


async def test_blocks_without_mtp_slots_serve_only_those_who_do_not_draft(
    player: Player, engine: Engine, tokenizer: Tokenizer
) -> None:
    """An answer made without drafts has none. A choice that drafts is sent what lacks them, and then drafts as ever."""
    ids, salt = tokenizer.encode(TEXT)[:32], "without drafts"
    first = await player.run(ids, message(tokenizer, params(40), 0), cached=True, salt=salt)
    ids = [*ids, *first.token_ids]
    for speculate, num_held in ((0, 4), (2, 2), (2, 4)):
        asked = params(9, seed=speculate)
        copy = await player.run(ids, message(tokenizer, asked, speculate), cached=True, salt=salt)
        expected = generate(engine, tokenizer, ids, asked, speculate=speculate, checksums=True)
        check_equal(copy, expected)
        check_moved(copy, engine, expected, num_tokens=len(ids), num_held_blocks=num_held)
        assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    await player.until_idle()


@pytest.mark.parametrize("num_emitted", [1, 7, 8, 9, 20])
async def test_a_resume_finds_what_was_there(
    player: Player, engine: Engine, tokenizer: Tokenizer, num_emitted: int
) -> None:
    """Prompt and emitted tokens are prefilled again on the same workers: what they hold is not sent, and the same
    tokens follow. Only tokens of the prompt count as cached."""
    ids, asked, salt = tokenizer.encode(TEXT)[:40], params(24), f"resume {num_emitted}"
    expected = generate(engine, tokenizer, ids, asked)
    whole = list(expected.token_ids)
    await player.run(ids, message(tokenizer, asked), cached=True, salt=salt)
    copy = await player.run(
        ids + whole[:num_emitted], message(tokenizer, asked), num_prompt_tokens=len(ids), cached=True, salt=salt
    )
    assert copy.tokens == {index: whole[index] for index in range(num_emitted, 24)}
    assert copy.cached_tokens == 32
    assert copy.handoff is not None
    num_tokens = len(ids) + num_emitted
    assert copy.handoff.bytes == num_tokens % BLOCK * engine.layout.bytes_per_token
    await player.until_idle()


async def test_another_attempt_takes_over_while_the_first_one_decodes(
    player: Player, engine: Engine, tokenizer: Tokenizer
) -> None:
    """As after a lost stream: the decode worker holds all that was emitted, in blocks that its earlier attempt still
    writes behind; nothing but the last block's slots is sent."""
    ids, asked, salt, journey_id = tokenizer.encode(TEXT)[:40], params(120), "take over", new_journey()
    whole = list(generate(engine, tokenizer, ids, asked).token_ids)
    reserve = player.reserve_request(journey_id, ids, message(tokenizer, asked), cached=True, salt=salt)
    lease = await player.decode.Reserve(reserve, timeout=CALL_TIMEOUT_S)
    async for reply in player.prefill_replies(player.prefill_request(reserve, lease)):
        if reply.HasField("source"):
            await player.pull(reserve, lease, reply.source)
    await player.until(journey_id, lambda copy: len(copy.tokens) > 30)
    again = player.reserve_request(
        journey_id, [*ids, *whole[:26]], message(tokenizer, asked), num_prompt_tokens=len(ids), attempt=2, cached=True,
        salt=salt,
    )
    lease = await player.decode.Reserve(again, timeout=CALL_TIMEOUT_S)
    assert lease.num_held_blocks == 4
    player.copies[journey_id] = Copy(attempt=2)
    async for reply in player.prefill_replies(player.prefill_request(again, lease)):
        if reply.HasField("source"):
            await player.pull(again, lease, reply.source)
    copy = await player.until(journey_id, Copy.has_ended)
    assert copy.failure is None
    assert [copy.tokens[index] for index in range(27, 120)] == whole[27:]
    assert copy.handoff is not None
    assert copy.handoff.bytes == (66 - 64) * engine.layout.bytes_per_token
    await player.release(journey_id, attempt=2)
    await player.until_idle()


async def test_salts_and_bypass(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """Another salt finds nothing; who passes the cache by takes nothing from it, but leaves something."""
    ids = tokenizer.encode(TEXT)[:33]
    asked = message(tokenizer, params(3))
    runs = ((False, "a", 0), (True, "a", 32), (True, "b", 0), (False, "a", 0), (True, "b", 32))
    for cached, salt, num_cached in runs:
        copy = await player.run(ids, asked, cached=cached, salt=salt)
        assert copy.cached_tokens == num_cached, (cached, salt)
        assert copy.handoff is not None
        assert copy.handoff.bytes == (33 - num_cached) * engine.layout.bytes_per_token
    await player.until_idle()


async def test_equal_prompts_at_once(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """Some compute what others have not finished, some find it: all get the same tokens, and nothing is left."""
    ids, asked = tokenizer.encode(TEXT)[:100], params(8)
    runs = [
        player.run(ids[: 100 - 7 * (number % 3)], message(tokenizer, asked), cached=True, salt="at once")
        for number in range(9)
    ]
    copies = await asyncio.gather(*runs)
    for number, copy in enumerate(copies):
        check_equal(copy, generate(engine, tokenizer, ids[: 100 - 7 * (number % 3)], asked))
    await player.until_idle()


async def test_length_edges_with_a_warm_cache(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """The longest prompt that fits the pool, over what a shorter one left: it is found, and room is made for the rest.
    One token more can never fit, whatever is cached."""
    num_blocks = 8 * 1024 * 1024 // engine.layout.block_bytes
    most, salt = num_blocks * BLOCK - 1, "edges"
    ids = (tokenizer.encode(TEXT) * 40)[:most]
    await player.run(ids[:1000], message(tokenizer, params(2)), cached=True, salt=salt)
    for length in (most - 1, most):
        copy = await player.run(ids[:length], message(tokenizer, params(2)), cached=True, salt=salt)
        assert len(copy.token_ids) == 2
        assert copy.cached_tokens == (992 if length < most else length // BLOCK * BLOCK)
        await player.until_idle()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await player.run([*ids, 7], message(tokenizer, params(2)), cached=True, salt=salt)
    assert isinstance(typed_error(caught.value), InvalidArgument)
    await player.until_idle()


async def test_cache_events_follow_what_is_stored(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """A snapshot, then changes; resumed after a gap; any number that was never given out is answered by a snapshot."""
    ids = tokenizer.encode(TEXT)[:48]
    await player.run(ids, message(tokenizer, params(2)), cached=True, salt="events")
    wanted = block_hashes(ids, fingerprint=engine.fingerprint, salt="events")
    for worker in (player.prefill_worker, player.decode_worker):
        call = worker.CacheEvents(pb.CacheEventsRequest(), timeout=CALL_TIMEOUT_S)
        batch = await call.read()
        assert isinstance(batch, pb.CacheEventBatch)
        assert batch.snapshot
        assert set(wanted) <= set(batch.stored)
        info = await worker.Info(pb.InfoRequest(), timeout=CALL_TIMEOUT_S)
        assert batch.epoch == info.epoch
        salt = new_journey()
        await player.run(ids[:16], message(tokenizer, params(2)), cached=True, salt=salt)
        known, [new] = set(batch.stored), block_hashes(ids[:16], fingerprint=engine.fingerprint, salt=salt)
        changes = batch
        while new not in known:
            before, changes = changes, await call.read()
            assert isinstance(changes, pb.CacheEventBatch)
            assert (changes.snapshot, changes.previous_sequence) == (False, before.sequence)
            assert changes.sequence > before.sequence
            assert set(changes.removed) <= known
            known = (known | set(changes.stored)) - set(changes.removed)
        call.cancel()
        for asked, is_snapshot in (
            (batch.sequence, False), (changes.sequence, False), (changes.sequence + 1, True), (2**64 - 1, True),
        ):
            again = worker.CacheEvents(pb.CacheEventsRequest(from_sequence=asked), timeout=CALL_TIMEOUT_S)
            first = await again.read()
            assert isinstance(first, pb.CacheEventBatch)
            assert (first.snapshot, first.sequence) == (is_snapshot, changes.sequence)
            assert first.previous_sequence == (0 if is_snapshot else asked)
            again.cancel()
    await player.until_idle()


async def pressure(player: Player, tokenizer: Tokenizer, max_tokens: int) -> None:
    """Other prompts, which need all the room that nothing is pinned in."""
    for number in range(4):
        ids = tokenizer.encode(TEXT)[number + 1 :][:700]
        await player.run(ids, message(tokenizer, params(max_tokens)), cached=True, salt=new_journey())


async def finish(player: Player, reserve: pb.ReserveRequest, lease: pb.ReserveReply) -> Copy:
    async for reply in player.prefill_replies(player.prefill_request(reserve, lease)):
        if reply.HasField("source"):
            await player.pull(reserve, lease, reply.source)
        else:
            copy = player.copy(reserve.journey.journey_id)
            copy.cached_tokens = reply.first_token.cached_tokens
    copy = await player.until(reserve.journey.journey_id, Copy.has_ended)
    await player.release(reserve.journey.journey_id)
    return copy


async def test_evict_while_sending(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """evict-while-sending: a prompt that was found in the cache waits to be fetched while others need all the room. Its
    blocks stay, arrive whole, and are found once more."""
    ids, asked, salt = tokenizer.encode(TEXT)[:640], params(6), "evict while sending"
    await player.run(ids, message(tokenizer, params(1)), cached=True, salt=salt)
    reserve = player.reserve_request(
        new_journey(), ids, message(tokenizer, asked), checksums=True, cached=True, salt=salt
    )
    lease = await player.decode.Reserve(reserve, timeout=CALL_TIMEOUT_S)
    replies = [reply async for reply in player.prefill_replies(player.prefill_request(reserve, lease))]
    await pressure(player, tokenizer, 1)
    await player.pull(reserve, lease, replies[0].source)
    copy = await player.until(reserve.journey.journey_id, Copy.has_ended)
    await player.release(reserve.journey.journey_id)
    expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
    check_equal(copy, expected)
    check_moved(copy, engine, expected, num_tokens=640, num_held_blocks=0)
    assert (await player.run(ids, message(tokenizer, params(1)), cached=True, salt=salt)).cached_tokens == 640
    await player.until_idle()


async def test_a_lease_pins_what_need_not_be_sent(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """Between Reserve and the end of the handoff others need all the room of the decode worker."""
    ids, asked, salt = tokenizer.encode(TEXT)[:320], params(6), "pinned by a lease"
    first = await player.run(ids, message(tokenizer, asked), cached=True, salt=salt)
    ids = [*ids, *first.token_ids]
    reserve = player.reserve_request(
        new_journey(), ids, message(tokenizer, asked), checksums=True, cached=True, salt=salt
    )
    lease = await player.decode.Reserve(reserve, timeout=CALL_TIMEOUT_S)
    assert lease.num_held_blocks == 20
    await pressure(player, tokenizer, 2)
    copy = await finish(player, reserve, lease)
    expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
    check_equal(copy, expected)
    check_moved(copy, engine, expected, num_tokens=326, num_held_blocks=20)
    assert copy.cached_tokens == 0
    await player.until_idle()


async def test_without_a_cache_nothing_is_kept(tokenizer: Tokenizer) -> None:
    """`engine.prefix_cache: false`: the same prompt again is computed and sent whole, and no event ever comes."""
    settings = {"engine": {"cache_mib": 8, "prefix_cache": False}}
    ids, asked = tokenizer.encode(TEXT)[:33], message(tokenizer, params(3))
    async with local_workers(settings) as (prefill, decode):
        player = Player(prefill, decode, SECRET)
        await player.open()
        for _ in range(2):
            copy = await player.run(ids, asked, cached=True)
            assert (copy.cached_tokens, copy.handoff and copy.handoff.bytes) == (0, 33 * 5_760)
        for worker in (player.prefill_worker, player.decode_worker):
            call = worker.CacheEvents(pb.CacheEventsRequest(), timeout=CALL_TIMEOUT_S)
            batch = await call.read()
            assert isinstance(batch, pb.CacheEventBatch)
            assert (batch.snapshot, batch.sequence, list(batch.stored)) == (True, 0, [])
            call.cancel()
        await player.until_idle()
        await player.close()


async def test_an_answer_that_its_router_ends_is_whole(tokenizer: Tokenizer) -> None:
    """As at a stop string, while no drafts are made: its full blocks have MTP's slots all the same, and a next turn
    that drafts finds them."""
    ids, num_told = tokenizer.encode(TEXT)[:32], 42
    settings = {**SETTINGS, "decode": {"adaptive_speculation": True}}
    async with local_workers(settings) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        journey_id = new_journey()
        running = asyncio.create_task(
            player.run(ids, message(tokenizer, params(400)), journey_id=journey_id, cached=True)
        )
        copy = await player.until(journey_id, lambda copy: len(copy.tokens) >= num_told)
        await player.release(journey_id)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await player.until_idle()
        next_turn = [*ids, *copy.token_ids[:num_told]]
        reserve = player.reserve_request(new_journey(), next_turn, message(tokenizer, params(4)), cached=True)
        assert (await player.reserve(reserve)).num_held_blocks == (len(next_turn) - 1) // BLOCK
        await player.release(reserve.journey.journey_id)
        await player.until_idle()
        await player.close()
