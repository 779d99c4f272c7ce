"""Prefixes that a worker pins for others: what is found, what is refused, how long it lasts, and that it arrives."""

from __future__ import annotations

import secrets
from typing import Any

import grpc
import pytest

from kv_transfer.journey import JourneyKey
from kv_transfer.source import SourceEnd
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import AlreadyExists, Gone, InvalidArgument
from pd_engine.hashing import block_hashes
from pd_engine.service.client import connect, kv_source_stub, typed_error
from pd_engine.settings import TransferSettings
from support.handoffs import FINGERPRINT, LAYOUT, SECRET, DestinationSide, SourceSide, new_key, running, slots_of
from support.leaks import assert_nothing_left, assert_pool_is_free, until

TOKENS = list(range(100, 180))  # five blocks


def request_for(key: JourneyKey, token_ids: list[int] = TOKENS, **changes: Any) -> pb.HoldRequest:
    fields: dict[str, Any] = {
        "journey": pb.JourneyRef(journey_id=key.journey_id, attempt=key.attempt), "token_ids": token_ids,
        "block_hashes": block_hashes(token_ids, fingerprint=FINGERPRINT), "lease_ms": 10_000,
    }
    return pb.HoldRequest(**(fields | changes))


async def test_cached_blocks_arrive_byte_for_byte() -> None:
    """All of them; the rest of what is here in part; none of what another salt, model or token leads to."""
    async with assert_nothing_left():
        await _fetch_some()


async def _fetch_some() -> None:
    source, destination = SourceSide(), DestinationSide()
    async with running(source, destination):
        blocks = source.keep([*TOKENS, 1, 2, 3])
        sent = slots_of(source.arena, blocks, 80)
        asked = (source.source.address, source.epoch)
        for num_held in (0, 2):
            key = new_key()
            held = await destination.hold(key, *asked, [*TOKENS, *range(16)], num_held_blocks=num_held)
            assert held is not None
            assert (held.num_blocks, source.source.num_pins) == (5, 1)
            assert all(source.pool.is_held(block) for block in blocks)
            own = destination.pool.allocate(num_held, "own")
            destination.pull_prefix(key, held, held_block_ids=own)
            result = await destination.result_of(key)
            assert result.closing.first_token_id is None
            assert result.num_bytes == (80 - 16 * num_held) * LAYOUT.bytes_per_token
            arrived = slots_of(destination.arena, result.block_ids, 80)
            start = num_held * 16
            for component, (there, here) in enumerate(zip(sent, arrived, strict=True)):
                first_byte = start * LAYOUT.components[component].slot_bytes
                assert here[first_byte:] == there[first_byte:]
            destination.free(key)
            destination.pool.release(own, "own")
            await until(lambda: source.source.num_pins == 0)
            assert source.holder.num_pinned_blocks == 0
        for tokens, salt in (([*TOKENS[:16], 9], "salt"), ([7, *TOKENS[1:]], "")):
            assert await destination.hold(new_key(), *asked, tokens, salt=salt) is None, (tokens[:2], salt)
        assert await destination.hold(new_key(), *asked, [*TOKENS, *range(32)], num_held_blocks=5) is None
    assert_pool_is_free(destination.pool)
    source.cache.check_integrity()
    assert_pool_is_free(source.pool)


async def test_blocks_without_mtp_slots_are_not_handed_over() -> None:
    """Nor those behind them: every component of what is handed over is final."""
    source, destination = SourceSide(), DestinationSide()
    async with running(source, destination):
        source.keep(TOKENS, num_final_mtp=47)
        held = await destination.hold(new_key(), source.source.address, source.epoch, TOKENS)
        assert held is not None
        assert held.num_blocks == 2
        assert await destination.hold(new_key(), source.source.address, source.epoch, TOKENS, num_held_blocks=2) is None


async def test_what_is_pinned_is_bounded() -> None:
    """In number, and in bytes: fewer leading blocks than there are, or none."""
    settings = TransferSettings(max_holds=2, max_hold_mib=1)
    source = SourceSide(settings=settings, num_blocks=200)
    destination = DestinationSide(num_blocks=200)
    most = (1 << 20) // LAYOUT.block_bytes
    tokens = list(range((most + 4) * 16))
    async with running(source, destination):
        source.keep(tokens)
        asked = (source.source.address, source.epoch)
        first, second = new_key(), new_key()
        some = await destination.hold(first, *asked, tokens[: 16 * (most - 1)])
        assert some is not None
        assert some.num_blocks == most - 1
        one = await destination.hold(second, *asked, tokens)
        assert one is not None
        assert one.num_blocks == 1
        assert source.holder.num_pinned_blocks == most
        source.source.release(second.journey_id, 1)
        assert await destination.hold(new_key(), *asked, tokens, num_held_blocks=1) is None
        assert await destination.hold(new_key(), *asked, tokens) is not None
        assert await destination.hold(new_key(), *asked, tokens[:16]) is None, "two are there"
        source.holder.draining = True
        source.source.release(first.journey_id, 1)
        assert await destination.hold(new_key(), *asked, tokens) is None


async def test_a_hold_ends_when_it_ends() -> None:
    """No manifest, no renewal and no greeting makes it longer; a destination that counts on it has ended before."""
    source, destination = SourceSide(), DestinationSide()
    async with running(source, destination):
        source.keep(TOKENS)
        key = new_key()
        held = await destination.hold(key, source.source.address, source.epoch, TOKENS, lease_ms=1_500)
        assert held is not None
        channel = connect(source.source.address, SECRET)
        ref = pb.JourneyRef(journey_id=key.journey_id, attempt=1)
        renewal = pb.SourceRenewRequest(journey=ref, token=held.source.token, lease_ms=3_600_000)
        assert (await kv_source_stub(channel).SourceRenew(renewal)).state != "gone"  # its checksums may be under way
        assert source.source.renew(key)
        await until(lambda: source.source.num_pins == 0)
        assert (await kv_source_stub(channel).SourceRenew(renewal)).state == "gone"
        await channel.close()
        destination.pull_prefix(key, held, lease_ms=1_500)
        with pytest.raises(Gone):
            await destination.result_of(key)
        destination.destination.release(key.journey_id, 1)
        await until(lambda: destination.destination.num_leases == 0)
    assert_pool_is_free(source.pool)
    assert_pool_is_free(destination.pool)


async def test_the_same_call_again_is_answered_alike() -> None:
    """Another payload is refused, a released one is gone, and no prompt's handoff can be named."""
    source = SourceSide()
    async with running(source):
        source.keep(TOKENS)
        channel = connect(source.source.address, SECRET)
        stub = kv_source_stub(channel)
        key, prompt = new_key(), new_key()
        first = await stub.Hold(request_for(key))
        assert (first.num_blocks, first.epoch) == (5, source.epoch)
        assert await stub.Hold(request_for(key)) == first
        assert source.source.num_pins == 1
        source.begin(prompt, 80)
        later = JourneyKey(prompt.journey_id, 2)
        for request in (request_for(key, TOKENS[:32]), request_for(prompt), request_for(later)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Hold(request)
            assert isinstance(typed_error(caught.value), AlreadyExists)
        assert source.source.num_pins == 2, "a prompt's handoff was touched"
        source.source.release(key.journey_id, 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Hold(request_for(key))
        assert isinstance(typed_error(caught.value), Gone)
        await channel.close()
    assert_pool_is_free(source.pool)
    assert source.ended == [(prompt, SourceEnd.RELEASED)]


@pytest.mark.parametrize("changes", [
    {"block_hashes": []}, {"block_hashes": [bytes(16)] * 65, "token_ids": list(range(65 * 16))},
    {"block_hashes": [bytes(15)] * 5}, {"block_hashes": [bytes(17)] * 5}, {"token_ids": []},
    {"token_ids": TOKENS[:79]}, {"token_ids": [*TOKENS, 1]}, {"num_held_blocks": 5}, {"num_held_blocks": 1 << 31},
    {"lease_ms": 0}, {"lease_ms": 3_600_001}, {"cache_salt": "x" * 257}, {"journey": None},
    {"journey": pb.JourneyRef(journey_id="z" * 32, attempt=1)}, {"journey": pb.JourneyRef(journey_id="a" * 32)},
    {"journey": pb.JourneyRef(journey_id="a" * 32, attempt=1_000_001)},
])
async def test_a_hostile_call_is_refused(changes: dict[str, Any]) -> None:
    source = SourceSide()
    async with running(source):
        source.keep(TOKENS)
        channel = connect(source.source.address, SECRET)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kv_source_stub(channel).Hold(request_for(new_key(), **changes))
        assert isinstance(typed_error(caught.value), InvalidArgument)
        assert source.source.num_pins == 0
        await channel.close()


async def test_hashes_of_other_tokens_find_nothing() -> None:
    """The tokens are hashed anew and compared, so a hash alone opens nothing."""
    source = SourceSide()
    async with running(source):
        source.keep(TOKENS)
        channel = connect(source.source.address, SECRET)
        other = [token + 1 for token in TOKENS]
        lies = request_for(new_key(), other, block_hashes=block_hashes(TOKENS, fingerprint=FINGERPRINT))
        for request in (lies, request_for(new_key(), block_hashes=[secrets.token_bytes(16) for _ in range(5)])):
            reply = await kv_source_stub(channel).Hold(request)
            assert (reply.num_blocks, reply.token) == (0, "")
        await channel.close()
    assert_pool_is_free(source.pool)


async def test_a_prompt_is_no_prefix() -> None:
    """A lease of one kind does not take what the other kind brings."""
    source, destination = SourceSide(), DestinationSide()
    async with running(source, destination):
        source.keep(TOKENS)
        key = new_key()
        held = await destination.hold(key, source.source.address, source.epoch, TOKENS)
        assert held is not None
        destination.reserve_and_pull(key, 80, held.source)
        with pytest.raises(InvalidArgument, match="closes with a first token"):
            await destination.result_of(key)
        key = new_key()
        info = source.begin(key, 80)
        lease = destination.destination.reserve(key, num_tokens=80, num_blocks=5, is_prefix=True)
        destination.destination.pull(key, lease.lease_id, info)
        source.publish_all(key, 80)
        with pytest.raises(InvalidArgument, match="closes with a first token"):
            await destination.result_of(key)


async def test_a_fetch_that_is_given_up_ends_the_pins() -> None:
    """The holder is told at once, whether the pull has begun or not."""
    source, destination = SourceSide(), DestinationSide()
    async with running(source, destination):
        source.keep(TOKENS)
        key = new_key()
        held = await destination.hold(key, source.source.address, source.epoch, TOKENS)
        assert held is not None
        destination.destination.let_go(key, source.source.address, source.epoch)
        await until(lambda: source.source.num_pins == 0)
        with pytest.raises(Gone):
            await destination.hold(key, source.source.address, source.epoch, TOKENS)
        key = new_key()
        held = await destination.hold(key, source.source.address, source.epoch, TOKENS)
        assert held is not None
        destination.pull_prefix(key, held)
        destination.destination.release(key.journey_id, 1)
        await until(lambda: source.source.num_pins == 0)
        assert key not in destination.completed
        with pytest.raises(Gone):
            await destination.hold(new_key(), source.source.address, secrets.token_hex(16), TOKENS)
    assert_pool_is_free(source.pool)
    assert_pool_is_free(destination.pool)
