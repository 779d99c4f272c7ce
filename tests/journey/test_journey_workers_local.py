"""Local prefill: a decode worker computes prompts itself, and nobody can tell by what comes out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.errors import FailedPrecondition, Gone
from pd_engine.generate import generate
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import typed_error
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import SECRET, local_workers
from support.demo_requests import check_equal, params
from support.player import CALL_TIMEOUT_S, Copy, Player, new_journey, sampling_message

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_SIZE = 16
SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 8, "chunk_tokens": 64},
    "decode": {"adaptive_speculation": False, "itl_budget_ms": 20.0},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player(engine: Engine) -> AsyncIterator[Player]:
    """After the engine, whose arena outlives it."""
    async with local_workers(SETTINGS) as (prefill_address, decode_address):
        player = Player(prefill_address, decode_address, SECRET)
        await player.open()
        yield player
        await player.until_idle()
        await player.close()


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [5 + (seed * 131 + position * 7) % 900 for position in range(num_tokens)]


async def run(player: Player, ids: list[int], asked: SamplingParams, speculate: int = 1, **changes: Any) -> Copy:
    return await player.run(ids, sampling_message(asked, [], speculate), local=True, **changes)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64, 65, 200])
async def test_a_prompt_that_decode_computes_equals_monolithic(
    player: Player, engine: Engine, tokenizer: Tokenizer, num_tokens: int
) -> None:
    ids = prompt(num_tokens, num_tokens)
    asked = params(
        seed=num_tokens, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25,
        min_tokens=6, logit_bias=((12, 1.5), (300, -100.0)),
    )
    copy = await run(player, ids, asked, speculate=num_tokens % 4)
    expected = generate(engine, tokenizer, ids, asked, speculate=num_tokens % 4, checksums=True)
    check_equal(copy, expected)
    assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    assert copy.handoff is None
    assert copy.local_prefill is not None
    assert tuple(copy.local_prefill.block_checksums) == expected.prompt_checksums
    assert copy.cached_tokens == 0
    await player.until_idle()


async def test_prompts_among_running_sequences(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """Some are handed over, some computed beside the steps of these, in chunks of whatever size fits."""
    cases = [(prompt(seed, 20 + 37 * seed), params(8 + 4 * seed, seed=seed)) for seed in range(6)]
    copies = await asyncio.gather(*(
        player.run(ids, sampling_message(asked, [], seed % 3), local=seed % 2 == 0)
        for seed, (ids, asked) in enumerate(cases)
    ))
    for seed, (copy, (ids, asked)) in enumerate(zip(copies, cases, strict=True)):
        expected = generate(engine, tokenizer, ids, asked, speculate=seed % 3)
        check_equal(copy, expected)
        assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    await player.until_idle()


@pytest.mark.parametrize("speculate", [0, 2])
@pytest.mark.parametrize("fresh", [0, 1, 15, 16, 30])
async def test_a_short_suffix_of_what_is_cached(
    player: Player, engine: Engine, tokenizer: Tokenizer, speculate: int, fresh: int
) -> None:
    """A next turn: the answer of the turn before is in the cache, as far as it fills blocks."""
    salt = f"{speculate}-{fresh}"
    ids, asked = prompt(50 + fresh, 40), params(14, seed=fresh)
    first = await run(player, ids, asked, speculate, cached=True, salt=salt)
    assert first.cached_tokens == 0
    longer = [*ids, *first.token_ids, *prompt(90, fresh)]
    second = await run(player, longer, params(9, seed=7), speculate, cached=True, salt=salt)
    expected = generate(engine, tokenizer, longer, params(9, seed=7), speculate=speculate)
    check_equal(second, expected)
    has_slots = len(ids) + 14 - 1  # the last token of an answer has none
    full = has_slots // BLOCK_SIZE * BLOCK_SIZE
    assert second.cached_tokens is not None
    assert second.cached_tokens in ([full] if not speculate else [full, full - BLOCK_SIZE]), "MTP's slots may lack"
    if second.cached_tokens == full:
        assert (second.accepted, second.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    await player.until_idle()


async def test_the_whole_prompt_is_cached(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """By a handoff before; one token is computed again, for its state."""
    ids, asked = prompt(7, 48), params(10)
    await player.run(ids, sampling_message(asked, [], 1), cached=True, salt="whole")
    copy = await run(player, ids, asked, 1, cached=True, salt="whole")
    expected = generate(engine, tokenizer, ids, asked, speculate=1)
    check_equal(copy, expected)
    assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    assert copy.cached_tokens == 48
    later = await player.run([*ids, 9], sampling_message(asked, [], 1), cached=True, salt="whole")
    check_equal(later, generate(engine, tokenizer, [*ids, 9], asked, speculate=1))
    assert later.handoff is not None
    assert later.handoff.bytes == engine.layout.bytes_per_token, "what was computed here is not sent again"


@pytest.mark.parametrize("num_emitted", range(1, 12))
async def test_a_resume_at_every_index(
    player: Player, engine: Engine, tokenizer: Tokenizer, num_emitted: int
) -> None:
    ids, asked = prompt(4, 21), params(12, repetition_penalty=1.3, frequency_penalty=0.5)
    whole = generate(engine, tokenizer, ids, asked)
    copy = await run(player, [*ids, *whole.token_ids[:num_emitted]], asked, 3, num_prompt_tokens=len(ids))
    check_equal(copy, whole, skip=num_emitted)


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_the_first_token_ends_it(
    player: Player, engine: Engine, tokenizer: Tokenizer, max_tokens: int
) -> None:
    ids = prompt(5, 25)
    [first] = generate(engine, tokenizer, ids, params(1)).token_ids
    asked = params(max_tokens, stop_token_ids=(first,) if max_tokens > 1 else ())
    copy = await run(player, ids, asked)
    check_equal(copy, generate(engine, tokenizer, ids, asked, speculate=1))
    assert copy.token_ids == [first]
    await player.until_idle()


async def _error(call: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return typed_error(caught.value)


async def test_the_call_is_idempotent_and_refused_where_it_cannot_be(player: Player, engine: Engine,
                                                                     tokenizer: Tokenizer) -> None:
    ids, asked = prompt(6, 90), params(30)
    journey_id = new_journey()
    reserve = player.reserve_request(journey_id, ids, sampling_message(asked, [], 1))
    lease = await player.reserve(reserve)
    wrong = pb.ReserveReply(lease_id="0" * 32)
    assert isinstance(await _error(player.compute_prompt(reserve, wrong)), Gone)
    await asyncio.gather(*(player.compute_prompt(reserve, lease) for _ in range(3)))
    copy = await player.until(journey_id, Copy.has_ended)
    check_equal(copy, generate(engine, tokenizer, ids, asked, speculate=1))
    assert isinstance(await _error(player.compute_prompt(reserve, lease)), Gone)
    await player.release(journey_id)
    unknown = player.reserve_request(new_journey(), ids, sampling_message(asked, [], 1))
    assert isinstance(await _error(player.compute_prompt(unknown, lease)), Gone)
    pulled = player.reserve_request(new_journey(), ids, sampling_message(asked, [], 1))
    lease = await player.reserve(pulled)
    async for reply in player.prefill_replies(player.prefill_request(pulled, lease)):
        if reply.HasField("source"):
            await player.pull(pulled, lease, reply.source)
            refusal = await _error(player.compute_prompt(pulled, lease))
            assert isinstance(refusal, FailedPrecondition | Gone)
    await player.release(pulled.journey.journey_id)
    await player.until_idle()


async def test_released_at_any_time_nothing_is_left(player: Player) -> None:
    """While it is queued, computed, or decoding."""
    for delay in range(12):
        journey_id = new_journey()
        reserve = player.reserve_request(
            journey_id, prompt(delay, 150), sampling_message(params(40), [], 1), cached=delay % 2 == 0
        )
        await player.compute_prompt(reserve, await player.reserve(reserve))
        for _ in range(delay):
            await player.loads()
        await player.release(journey_id)
        assert isinstance(
            await _error(player.decode.Reserve(reserve, timeout=CALL_TIMEOUT_S)), Gone
        )
    await player.until_idle()


async def test_a_deadline_that_passes_before_the_first_token(player: Player) -> None:
    asked = sampling_message(params(20), [], 1)
    journey_id = new_journey()
    reserve = player.reserve_request(journey_id, prompt(3, 400), asked, deadline_ms=1)
    lease = await player.reserve(reserve)
    with contextlib.suppress(grpc.aio.AioRpcError):  # it may have passed already
        await player.compute_prompt(reserve, lease)
    copy = await player.until(journey_id, Copy.has_ended)
    assert copy.failure is not None
    assert copy.failure.code == "deadline_exceeded"
    assert not copy.tokens
    await player.release(journey_id)
    await player.until_idle()
