"""Many journeys at once, cancelled at random stages: the survivors' tokens are right, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from pd_engine.engine import Engine
from pd_engine.errors import ErrorCode
from pd_engine.generate import generate
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import typed_error
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import SECRET, local_workers
from support.player import Copy, Player, new_journey, sampling_message

SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 12, "chunk_tokens": 64},
    "decode": {"max_batch": 8},
    "transfer": {"lease_ms": 120_000, "max_bytes_in_flight": 100_000},
}
ABORTED = (ErrorCode.GONE, ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED)


def params(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=0.95, top_k=-1, seed=seed, max_tokens=4 + seed % 5, ignore_eos=True, logprobs=0
    )


def prompt(seed: int) -> list[int]:
    """Some share their beginning, none their length class."""
    return [5 + (seed % 3 * 100 + number) % 900 for number in range(1 + seed * 13 % 150)]


async def journey(player: Player, seed: int, rng: random.Random, *, abort: bool, cached: bool) -> Copy | None:
    """The copy, or None if it was aborted."""
    journey_id, sampling = new_journey(), sampling_message(params(seed), [], seed % 3)
    request = player.reserve_request(journey_id, prompt(seed), sampling, cached=cached)
    copy = player.copy(journey_id)
    killer = asyncio.create_task(_release_later(player, journey_id, rng)) if abort else None
    try:
        lease = await player.reserve(request)
        async for reply in player.prefill_replies(player.prefill_request(request, lease)):
            if reply.HasField("source"):
                await player.pull(request, lease, reply.source)
            else:
                first = reply.first_token
                copy.add(first.index, [first.token_id], [first.logprobs])
        if killer is None:
            await player.until(journey_id, Copy.has_ended)
            await player.release(journey_id)
            return copy
    except grpc.aio.AioRpcError as error:
        if killer is None or typed_error(error).code not in ABORTED:
            raise
    await killer
    return None


async def _release_later(player: Player, journey_id: str, rng: random.Random) -> None:
    """After a random number of turns of the event loop: at any stage of the journey."""
    for _ in range(int(rng.expovariate(1 / 60))):
        await asyncio.sleep(0.001)
    await player.release(journey_id)


@pytest.mark.parametrize(("num_journeys", "abort_share", "cached"), [(50, 0.0, False), (40, 0.6, True)])
async def test_concurrent_handoffs(
    engine: Engine, tokenizer: Tokenizer, num_journeys: int, abort_share: float, cached: bool
) -> None:
    """Cold, and over caches that are too small for all that they are given."""
    rng = random.Random(11)
    async with local_workers(SETTINGS) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        aborted = [rng.random() < abort_share for _ in range(num_journeys)]
        copies = await asyncio.gather(
            *(journey(player, seed, rng, abort=aborted[seed], cached=cached) for seed in range(num_journeys))
        )
        await player.until_idle()
        await player.close()
    for seed, copy in enumerate(copies):
        if copy is not None:
            expected = generate(engine, tokenizer, prompt(seed), params(seed), speculate=seed % 3)
            assert copy.failure is None
            assert copy.token_ids == list(expected.token_ids), seed
            assert [copy.logprobs[i][0] for i in sorted(copy.logprobs)] == [lp.logprob for lp in expected.logprobs]
    assert sum(copy is not None for copy in copies) == aborted.count(False)
