"""A decode worker that computes a prompt takes another worker's blocks first: the tokens of one process, exact counts,
and a prompt that is computed where that does not work out."""

from __future__ import annotations

import asyncio
import signal
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
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import typed_error
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import start_process
from support.demo_requests import check_equal, params
from support.fetching_workers import BLOCK, HASTY, SETTINGS, Workers, holder, started
from support.player import Copy, Player, new_journey, sampling_message

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "A generator is a function that returns an iterator, and it remembers where it was when it yields. " * 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    async with started(SETTINGS, tmp_path_factory.mktemp("workers"), decode=2) as workers:
        yield workers
        await workers.until_idle()


async def run(
    player: Player, ids: list[int], asked: SamplingParams, *, speculate: int = 1, salt: str = "", local: bool = True,
    said: pb.PrefixHolder | None = None, cached: bool = True,
) -> Copy:
    message = sampling_message(asked, [], speculate)
    return await player.run(ids, message, local=local, cached=cached, salt=salt, holder=said)


def check(copy: Copy, expected: Generation, num_cached: int) -> None:
    """Ids, logprob bits, drafts and every slot of the prompt."""
    check_equal(copy, expected)
    assert copy.cached_tokens == num_cached
    assert copy.local_prefill is not None
    assert tuple(copy.local_prefill.block_checksums) == expected.prompt_checksums
    assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)


async def test_a_conversation_moves_to_another_decode_worker(
    workers: Workers, engine: Engine, tokenizer: Tokenizer
) -> None:
    """Without a prefill worker: all that is full is fetched, answers included, and stays where it came to."""
    salt, text = "turns", tokenizer.encode(TEXT)
    ids = text[:40]
    for turn in range(3):
        place, asked = turn % 2, params(21, seed=turn)
        copy = await run(
            workers.players[place], ids, asked, salt=salt,
            said=holder(workers.decode[1 - place], len(ids)) if turn else None,
        )
        expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
        check(copy, expected, (len(ids) - 7 - 1) // BLOCK * BLOCK if turn else 0)
        ids = [*ids, *copy.token_ids, *text[40:47]]
    again = await run(workers.players[0], ids[:-28], params(2), salt=salt)
    assert again.cached_tokens == (len(ids) - 28) // BLOCK * BLOCK, "what was fetched is not found"
    await workers.until_idle()


@pytest.mark.parametrize(("num_there", "num_here", "length"), [
    (48, 0, 48), (48, 0, 49), (49, 17, 80), (160, 32, 161), (16, 16, 40), (32, 48, 60),
])
async def test_parts_of_every_size(
    workers: Workers, engine: Engine, tokenizer: Tokenizer, num_there: int, num_here: int, length: int
) -> None:
    """From a prefill worker, of which some is here already; a prompt that is there whole; nothing more than is here."""
    ids, salt, player = tokenizer.encode(TEXT), f"{num_there} {num_here} {length}", workers.players[0]
    await run(player, ids[:num_there], params(1), salt=salt, local=False)
    if num_here:
        await run(player, ids[:num_here], params(1), salt=salt)
    asked = params(8)
    copy = await run(player, ids[:length], asked, salt=salt, said=holder(workers.prefill[0], length))
    expected = generate(engine, tokenizer, ids[:length], asked, speculate=1, checksums=True)
    check(copy, expected, max(num_there, num_here) // BLOCK * BLOCK)
    await workers.until_idle()


@pytest.mark.parametrize("speculate", [0, 2])
async def test_blocks_without_mtp_slots(
    workers: Workers, engine: Engine, tokenizer: Tokenizer, speculate: int
) -> None:
    """An answer that was made without drafts: what is there without MTP's slots is not fetched. What is here without
    them is fetched by one that drafts, and used by one that does not."""
    ids, salt = tokenizer.encode(TEXT)[:32], f"without drafts {speculate}"
    first = await run(workers.players[0], ids, params(40), speculate=0, salt=salt)
    longer, asked = [*ids, *first.token_ids], params(9)
    expected = generate(engine, tokenizer, longer, asked, speculate=speculate, checksums=True)
    copy = await run(
        workers.players[1], longer, asked, speculate=speculate, salt=salt, said=holder(workers.decode[0], len(longer))
    )
    check(copy, expected, 32)
    again = await run(
        workers.players[0], longer, asked, speculate=speculate, salt=salt, said=holder(workers.decode[1], len(longer))
    )
    assert again.token_ids == list(expected.token_ids)
    assert again.cached_tokens == 64
    if speculate:
        check(again, expected, 64)
    await workers.until_idle()


@pytest.mark.parametrize("num_emitted", [1, 8, 20])
async def test_a_resume_elsewhere(workers: Workers, engine: Engine, tokenizer: Tokenizer, num_emitted: int) -> None:
    """Prompt and emitted tokens at another worker: the same tokens follow; only those of the prompt count as cached."""
    ids, asked, salt = tokenizer.encode(TEXT)[:40], params(24), f"resume {num_emitted}"
    whole = list(generate(engine, tokenizer, ids, asked).token_ids)
    await run(workers.players[0], ids, asked, salt=salt)
    copy = await workers.players[1].run(
        ids + whole[:num_emitted], sampling_message(asked, [], 1), num_prompt_tokens=len(ids), cached=True, salt=salt,
        holder=holder(workers.decode[0], len(ids) + num_emitted), local=True,
    )
    assert copy.tokens == {index: whole[index] for index in range(num_emitted, 24)}
    assert copy.cached_tokens == (40 if num_emitted >= 8 else 32)
    await workers.until_idle()


async def test_who_has_nothing_is_asked_in_vain(workers: Workers, engine: Engine, tokenizer: Tokenizer) -> None:
    """Another salt, another life of the holder, nobody at the address, itself; and nobody is asked for a choice that
    passes the caches by."""
    ids, asked = tokenizer.encode(TEXT)[:70], params(4)
    expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
    await run(workers.players[0], ids, params(1), salt="here")
    right = holder(workers.decode[0], 70)
    for cached, salt, said in (
        (True, "elsewhere", right), (False, "here", right),
        (True, "epoch", pb.PrefixHolder(address=right.address, epoch="a" * 32, num_blocks=4)),
        (True, "nobody", pb.PrefixHolder(address="127.0.0.1:1", epoch=right.epoch, num_blocks=4)),
        (True, "itself", holder(workers.decode[1], 70)),
    ):
        check(await run(workers.players[1], ids, asked, salt=salt, said=said, cached=cached), expected, 0)
    await workers.until_idle()


@pytest.mark.parametrize("said", [
    {"num_blocks": 0}, {"num_blocks": 10**6}, {"address": ""}, {"address": "unix:/tmp/x"}, {"epoch": "A" * 32},
])
async def test_a_bad_holder_is_refused(workers: Workers, tokenizer: Tokenizer, said: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"address": "127.0.0.1:9", "epoch": "a" * 32, "num_blocks": 4}
    player = workers.players[0]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run(player, tokenizer.encode(TEXT)[:70], params(2), said=pb.PrefixHolder(**(fields | said)))
    error = typed_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert "prefix_holder" in error.message
    for journey_id in list(player.copies):
        await player.release(journey_id)
    await workers.until_idle()


async def test_many_at_once(workers: Workers, engine: Engine, tokenizer: Tokenizer) -> None:
    """Equal and different prompts, from both holders, some cancelled, some taken over by a next attempt: all tokens,
    and nothing is left."""
    ids, asked, player = tokenizer.encode(TEXT)[:300], params(6), workers.players[1]
    await run(workers.players[0], ids[:280], params(1), salt="many")
    await run(player, ids[:200], params(1), salt="many", local=False)
    lengths = [300 - 23 * (number % 4) for number in range(9)]

    async def disturbed(number: int) -> None:
        """Placed, and at once ended or placed again."""
        journey_id, length = new_journey(), lengths[number]
        for attempt in (1, 2):
            reserve = player.reserve_request(
                journey_id, ids[:length], sampling_message(asked, [], 1), attempt=attempt, cached=True, salt="many"
            )
            lease = await player.reserve(reserve)
            await player.compute_prompt(reserve, lease, holder(workers.decode[0], length))
            if number % 2:
                break
        await player.release(journey_id, 2)

    copies, _ = await asyncio.gather(
        asyncio.gather(*(
            run(player, ids[:length], asked, salt="many",
                said=holder((workers.decode[0], workers.prefill[0])[number % 2], length))
            for number, length in enumerate(lengths)
        )),
        asyncio.gather(*(disturbed(number) for number in range(4))),
    )
    for length, copy in zip(lengths, copies, strict=True):
        assert copy.failure is None
        assert copy.token_ids == list(generate(engine, tokenizer, ids[:length], asked).token_ids)
    await workers.until_idle()


@pytest.mark.slow
async def test_a_holder_that_is_stopped_costs_the_fetch_its_time(
    engine: Engine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """SIGSTOP: the prompt is computed after `prefix_fetch_ms`. Meanwhile others go on, and one that is cancelled leaves
    nothing. Then the holder is killed, and started anew where it was: another life, of which nothing is taken."""
    ids, asked = tokenizer.encode(TEXT)[:70], params(4)
    expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
    async with started(HASTY, tmp_path, decode=2) as workers:
        there, player = workers.decode[0], workers.players[1]
        await run(workers.players[0], ids, params(1), salt="stopped")
        there.signal(signal.SIGSTOP)
        late = asyncio.create_task(run(player, ids, asked, salt="stopped", said=holder(there, 70)))
        left = player.reserve_request(new_journey(), ids, sampling_message(asked, [], 1), cached=True, salt="stopped")
        await player.compute_prompt(left, await player.reserve(left), holder(there, 70))
        check(await run(player, ids, asked, salt="other"), expected, 0)
        await player.release(left.journey.journey_id)
        check(await late, expected, 0)
        there.signal(signal.SIGCONT)
        await workers.until_idle()
        await there.kill()
        port = int(there.address.rpartition(":")[2])
        for salt in ("killed", "anew"):
            check(await run(player, ids, asked, salt=salt, said=holder(there, 70)), expected, 0)
            if salt == "killed":
                anew = await start_process("decode", "decode-0", HASTY, tmp_path, port=port)
        await anew.kill()
        await player.until_idle()
