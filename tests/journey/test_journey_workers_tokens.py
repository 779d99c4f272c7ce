"""One prefill and one decode worker as real processes: what comes out is what one process generates alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.generate import Generation, generate
from pd_engine.sampling.params import SamplingParams
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import SECRET, worker_processes
from support.player import CALL_TIMEOUT_S, Copy, Player, new_journey, sampling_message

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 24, "chunk_tokens": 128},
    "decode": {"adaptive_speculation": False},  # drafts are counted
}
TEXT = "A list is a kind of object that holds other objects, and a method of it may change which ones. " * 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Player]:
    log_dir: Path = tmp_path_factory.mktemp("workers")
    async with worker_processes(SETTINGS, log_dir) as ([prefill], [decode]):
        player = Player(prefill.address, decode.address, SECRET)
        await player.open()
        yield player
        await player.until_idle()
        await player.close()


def params(max_tokens: int = 12, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": 3, "max_tokens": max_tokens, "ignore_eos": True,
    }
    return SamplingParams(**(fields | changes))


def prompt(tokenizer: Tokenizer, num_tokens: int, skip: int = 0) -> list[int]:
    return tokenizer.encode(TEXT)[skip : skip + num_tokens]


def message(tokenizer: Tokenizer, asked: SamplingParams, speculate: int = 1) -> pb.Sampling:
    return sampling_message(asked, tokenizer.eos_token_ids, speculate)


def check_equal(copy: Copy, expected: Generation) -> None:
    """Ids, ends, logprob bits, counts of speculation."""
    assert copy.failure is None
    assert copy.token_ids == list(expected.token_ids)
    assert (copy.finish_reason, copy.stop_reason) == (expected.finish_reason.value, expected.stop_reason)
    assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    received = [copy.logprobs[index] for index in sorted(copy.logprobs)]
    assert received == [(item.logprob, item.top) for item in expected.logprobs]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 129, 300])
async def test_tokens_logprobs_checksums_and_bytes_equal_monolithic(
    player: Player, engine: Engine, tokenizer: Tokenizer, num_tokens: int
) -> None:
    ids = prompt(tokenizer, num_tokens)
    asked = params(
        temperature=0.8, top_p=0.95, seed=num_tokens, logprobs=2, ignore_eos=False, min_p=0.02, repetition_penalty=1.2,
        presence_penalty=0.5, frequency_penalty=0.25, min_tokens=6, logit_bias=((12, 1.5), (300, -100.0)),
    )
    copy = await player.run(ids, message(tokenizer, asked))
    expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
    check_equal(copy, expected)
    assert copy.handoff is not None
    assert copy.handoff.bytes == num_tokens * engine.layout.bytes_per_token
    assert tuple(copy.handoff.block_checksums) == expected.prompt_checksums
    await player.until_idle()


@pytest.mark.parametrize("speculate", [0, 1, 3])
async def test_speculation_changes_no_token(
    player: Player, engine: Engine, tokenizer: Tokenizer, speculate: int
) -> None:
    ids, asked = prompt(tokenizer, 40), params(20)
    copy = await player.run(ids, message(tokenizer, asked, speculate))
    check_equal(copy, generate(engine, tokenizer, ids, asked, speculate=speculate))
    assert copy.token_ids == list(generate(engine, tokenizer, ids, asked).token_ids)


@pytest.mark.parametrize("speculate", [1, 3])
async def test_mtp_first_draft(player: Player, engine: Engine, tokenizer: Tokenizer, speculate: int) -> None:
    """The MTP state came along: the first drafts after a handoff, and what is accepted of them, are those of one
    process."""
    for num_tokens in (16, 41):
        for max_tokens in (2, 3, 5):
            ids, asked = prompt(tokenizer, num_tokens, skip=max_tokens), params(max_tokens)
            copy = await player.run(ids, message(tokenizer, asked, speculate))
            expected = generate(engine, tokenizer, ids, asked, speculate=speculate)
            assert expected.drafted_tokens > 0 or max_tokens == 2
            check_equal(copy, expected)


async def test_journeys_that_share_steps_equal_those_that_run_alone(
    player: Player, engine: Engine, tokenizer: Tokenizer
) -> None:
    cases = [
        (prompt(tokenizer, 20 + 17 * number, skip=number), params(4 + 2 * number, temperature=0.7, seed=number))
        for number in range(6)
    ]
    copies = await asyncio.gather(*(player.run(ids, message(tokenizer, asked)) for ids, asked in cases))
    for copy, (ids, asked) in zip(copies, cases, strict=True):
        check_equal(copy, generate(engine, tokenizer, ids, asked, speculate=1))
    await player.until_idle()


async def test_lost_first_reply(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """The first token reaches the router through the decode worker too, with its logprobs."""
    ids, asked = prompt(tokenizer, 33), params(logprobs=1)
    copy = await player.run(ids, message(tokenizer, asked), lose_first_reply=True)
    check_equal(copy, generate(engine, tokenizer, ids, asked, speculate=1))


async def test_first_token_ends_it(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    ids = prompt(tokenizer, 25)
    [first] = generate(engine, tokenizer, ids, params(1)).token_ids
    asked = params(stop_token_ids=(first,))
    copy = await player.run(ids, message(tokenizer, asked))
    check_equal(copy, generate(engine, tokenizer, ids, asked, speculate=1))
    assert copy.token_ids == [first]
    await player.until_idle()


async def test_max_tokens_1_needs_no_handoff(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    ids, asked = prompt(tokenizer, 50), params(1, logprobs=0)
    reserve = player.reserve_request(new_journey(), ids, message(tokenizer, asked))
    replies = [reply async for reply in player.prefill_replies(player.prefill_request(reserve, None, no_handoff=True))]
    expected = generate(engine, tokenizer, ids, asked)
    assert [reply.WhichOneof("reply") for reply in replies] == ["first_token"]
    first = replies[0].first_token
    assert ([first.token_id], first.finish_reason, first.index) == (list(expected.token_ids), "length", 0)
    assert first.logprobs.logprob == expected.logprobs[0].logprob
    await player.until_idle()


async def test_a_stop_token_inside_an_accepted_run_ends_it_there(
    player: Player, engine: Engine, tokenizer: Tokenizer
) -> None:
    ids = prompt(tokenizer, 30)
    whole = generate(engine, tokenizer, ids, params(16)).token_ids
    for position in (1, 2, 5):
        asked = params(16, stop_token_ids=(whole[position],))
        copy = await player.run(ids, message(tokenizer, asked, speculate=3))
        check_equal(copy, generate(engine, tokenizer, ids, asked, speculate=3))
        assert len(copy.token_ids) <= position + 1


@pytest.mark.parametrize("num_emitted", [1, 7])
async def test_a_resume_goes_on_with_the_same_tokens_and_indices(
    player: Player, engine: Engine, tokenizer: Tokenizer, num_emitted: int
) -> None:
    ids, asked = prompt(tokenizer, 21), params(12, temperature=0.9)
    whole = list(generate(engine, tokenizer, ids, asked).token_ids)
    copy = await player.run(
        ids + whole[:num_emitted], message(tokenizer, asked), num_prompt_tokens=len(ids)
    )
    assert copy.tokens == {index: whole[index] for index in range(num_emitted, 12)}
    assert copy.finish_reason == "length"


async def test_a_router_that_loses_its_stream_gets_every_token_again(
    player: Player, engine: Engine, tokenizer: Tokenizer
) -> None:
    ids, asked = prompt(tokenizer, 35), params(240)
    journey_id = new_journey()
    running = asyncio.create_task(player.run(ids, message(tokenizer, asked), journey_id=journey_id))
    copy = await player.until(journey_id, lambda copy: len(copy.tokens) > 3)
    await player.cut_stream()
    assert not copy.finish_reason
    copy.tokens.clear()
    await player.open()
    copy = await running
    assert copy.token_ids == list(generate(engine, tokenizer, ids, asked).token_ids)
    await player.until_idle()


async def test_calls_are_idempotent(player: Player, engine: Engine, tokenizer: Tokenizer) -> None:
    """The same Reserve, Prefill and Pull again, while it runs and after its end, change nothing."""
    ids, asked = prompt(tokenizer, 45), params(8)
    journey_id = new_journey()
    reserve = player.reserve_request(journey_id, ids, message(tokenizer, asked))
    lease = await player.decode.Reserve(reserve, timeout=CALL_TIMEOUT_S)
    again = await player.decode.Reserve(reserve, timeout=CALL_TIMEOUT_S)
    assert again.lease_id == lease.lease_id
    request = player.prefill_request(reserve, lease)

    async def prefill() -> list[pb.PrefillReply]:
        replies = []
        async for reply in player.prefill_replies(request):
            replies.append(reply)
            if reply.HasField("source"):
                await player.pull(reserve, lease, reply.source)
        return replies

    first, second = await asyncio.gather(prefill(), prefill())
    assert first == second
    copy = await player.until(journey_id, Copy.has_ended)
    assert [reply async for reply in player.prefill_replies(request)] == first
    assert copy.token_ids == list(generate(engine, tokenizer, ids, asked).token_ids)
    await player.release(journey_id)
    await player.until_idle()
