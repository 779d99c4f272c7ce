"""Demand beyond the blocks of a decode worker: sequences leave for host memory and come back, and nobody can tell."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc
import psutil
import pytest

from decode_worker import host_tier
from decode_worker.preemption import QUIET_STEPS
from decode_worker.room import RoomKeeper
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.errors import InvalidArgument
from pd_engine.generate import Generation, generate
from pd_engine.hashing import block_hashes
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import kv_source_stub, typed_error
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import SECRET, local_workers
from support.player import CALL_TIMEOUT_S, Copy, Player, new_journey, sampling_message

MIB = 1024 * 1024
BLOCK_SIZE = 16
SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 1, "chunk_tokens": 64},  # 11 blocks
    "decode": {"max_batch": 16, "projected_tokens": 16, "adaptive_speculation": False},
}
MAX_TOKENS = 60
NUM_ROUNDS = 10


def params(seed: int, max_tokens: int = MAX_TOKENS) -> SamplingParams:
    """Some with penalties, which count what was generated."""
    return SamplingParams(
        temperature=0.8, top_p=0.95, top_k=-1, seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=seed % 2,
        repetition_penalty=1.0 + 0.2 * (seed % 2), frequency_penalty=0.3 * (seed % 3),
    )


def prompt(seed: int) -> list[int]:
    """Half of them begin alike."""
    return [5 + (seed % 2 * 300 * seed + number) % 900 for number in range(20 + seed)]


def sampling(seed: int, max_tokens: int = MAX_TOKENS) -> pb.Sampling:
    return sampling_message(params(seed, max_tokens), [], seed % 4)


def expected(engine: Engine, tokenizer: Tokenizer, seeds: list[int]) -> dict[int, Generation]:
    return {seed: generate(engine, tokenizer, prompt(seed), params(seed), speculate=seed % 4) for seed in seeds}


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_twice_the_room(engine: Engine, tokenizer: Tokenizer, cached: bool) -> None:
    seeds = list(range(5))
    async with local_workers(SETTINGS) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        copies = await asyncio.gather(*(player.run(prompt(seed), sampling(seed), cached=cached) for seed in seeds))
        await player.until_idle()
        _, load = await player.loads()
        await player.close()
    assert sum(len(prompt(seed)) + MAX_TOKENS - 1 for seed in seeds) > 2 * load.num_blocks_total * BLOCK_SIZE
    assert 0 < load.num_moves_total <= len(seeds) * (1 + MAX_TOKENS // QUIET_STEPS)
    assert load.num_recomputed_total == 0
    for seed, alone in expected(engine, tokenizer, seeds).items():
        copy = copies[seed]
        assert copy.failure is None
        assert copy.token_ids == list(alone.token_ids), seed
        assert [copy.logprobs[index][0] for index in sorted(copy.logprobs)] == [lp.logprob for lp in alone.logprobs]
        if not cached:  # what was cached may lack MTP's slots
            assert (copy.accepted, copy.drafted) == (alone.accepted_tokens, alone.drafted_tokens), seed


async def test_cancel_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rounds, each until a sequence leaves for host memory; then all are cancelled, and nothing stays mapped."""
    copies: list[host_tier.HostCopy] = []
    rss_bytes: list[int] = []

    class Watched(host_tier.HostCopy):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            copies.append(self)

    monkeypatch.setattr(host_tier, "HostCopy", Watched)
    async with local_workers(SETTINGS) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        for _ in range(NUM_ROUNDS):
            ids = [new_journey() for _ in range(4)]
            running = [
                asyncio.create_task(player.run(prompt(seed), sampling(seed, 140), journey_id=journey_id))
                for seed, journey_id in enumerate(ids)
            ]
            call = player.decode_worker.Loads(pb.LoadsRequest(interval_ms=20))
            async for load in call:
                if load.num_preempted:
                    call.cancel()
                    break
            assert load.host_cache_bytes
            assert not all(player.copy(journey_id).has_ended() for journey_id in ids)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for journey_id in ids:
                await player.release(journey_id)
            await player.until_idle()
            assert all(copy.is_closed for copy in copies)
            rss_bytes.append(psutil.Process(os.getpid()).memory_info().rss)
        _, load = await player.loads()
        assert load.num_moves_total > 0
        assert len(copies) >= load.num_moves_total
        await player.close()
    assert min(rss_bytes[NUM_ROUNDS // 2 :]) - min(rss_bytes[1 : NUM_ROUNDS // 2]) < 16 * MIB, rss_bytes


async def test_one_giant() -> None:
    """It is refused before any prefill; the others go on."""
    async with local_workers(SETTINGS) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        other = asyncio.create_task(player.run(prompt(1), sampling(1)))
        request = player.reserve_request(new_journey(), prompt(0), sampling(0, 11 * BLOCK_SIZE))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await player.decode.Reserve(request, timeout=CALL_TIMEOUT_S)
        error = typed_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert "a decode worker has 11" in error.message
        assert len((await other).token_ids) == MAX_TOKENS
        await player.until_idle()
        await player.close()


@pytest.mark.slow
async def test_without_host_memory_they_are_computed_again(engine: Engine, tokenizer: Tokenizer) -> None:
    """Given up with an error that is worth another try, and resumed with the same tokens."""
    settings = SETTINGS | {"decode": SETTINGS["decode"] | {"host_cache_mib": 0}}
    seeds = list(range(4))
    async with local_workers(settings) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        tokens = await asyncio.gather(*(_until_done(player, seed) for seed in seeds))
        await player.until_idle()
        _, load = await player.loads()
        await player.close()
    assert load.num_recomputed_total > 0
    assert load.num_moves_total == 0
    for seed, alone in expected(engine, tokenizer, seeds).items():
        assert tokens[seed] == list(alone.token_ids), seed


async def _until_done(player: Player, seed: int) -> list[int]:
    """As a router: placed again after every failure that allows it, with what it has."""
    tokens: list[int] = []
    while True:
        copy: Copy = await player.run(prompt(seed) + tokens, sampling(seed), num_prompt_tokens=len(prompt(seed)))
        tokens += [copy.tokens[index] for index in sorted(copy.tokens)]
        if copy.failure is None:
            return tokens
        assert copy.failure.code == "resource_exhausted"
        assert copy.failure.retryable


async def test_nothing_is_pinned_for_others_while_a_sequence_waits_to_come_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another worker would fetch might be its room."""
    ids = prompt(11)
    async with local_workers(SETTINGS) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        await player.run(ids, sampling(0, 2), cached=True)

        async def num_held() -> int:
            ref = pb.JourneyRef(journey_id=new_journey(), attempt=1)
            request = pb.HoldRequest(
                journey=ref, token_ids=ids[:BLOCK_SIZE], lease_ms=1_000,
                block_hashes=block_hashes(ids[:BLOCK_SIZE], fingerprint=engine.fingerprint),
            )
            reply = await kv_source_stub(player.decode_channel).Hold(request, timeout=CALL_TIMEOUT_S)
            await player.release(ref.journey_id)
            return reply.num_blocks

        assert await num_held() == 1
        monkeypatch.setattr(RoomKeeper, "num_preempted", 1)
        assert await num_held() == 0
        monkeypatch.undo()
        assert await num_held() == 1
        await player.until_idle()
        await player.close()
