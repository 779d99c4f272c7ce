"""A prefill worker that has nothing cached takes another worker's blocks: the tokens of one process, exactly the bytes
and counts, and a prompt that is computed where that does not work out."""

from __future__ import annotations

import asyncio
import secrets
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
from pd_engine.hashing import block_hashes
from pd_engine.service.client import connect, kv_source_stub, typed_error, worker_stub
from pd_engine.text.tokenizer import Tokenizer
from support.cluster import SECRET, start_process
from support.demo_requests import TEXT, check_equal, message, params
from support.fetching_workers import BLOCK, HASTY, SETTINGS, Workers, holder, started
from support.player import CALL_TIMEOUT_S, Copy, new_journey

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    async with started(SETTINGS, tmp_path_factory.mktemp("workers"), prefill=2) as workers:
        yield workers
        await workers.until_idle()


def check(copy: Copy, expected: Generation, num_cached: int) -> None:
    check_equal(copy, expected)
    assert copy.cached_tokens == num_cached
    assert copy.handoff is not None
    sums = zip(copy.handoff.block_checksums, expected.prompt_checksums, strict=True)
    assert all(moved in (0, wanted) for moved, wanted in sums)


async def test_the_next_turn_takes_the_blocks_of_the_decode_worker(
    workers: Workers, engine: Engine, tokenizer: Tokenizer
) -> None:
    """Placed on a worker that has nothing: answers included, all that is full is fetched, and stays there. What the
    decode worker has is not sent back to it."""
    salt, text = "turns", tokenizer.encode(TEXT)
    ids = text[:40]
    for turn in range(3):
        asked = params(21, seed=turn)
        place = turn % 2
        copy = await workers.players[place].run(
            ids, message(tokenizer, asked), cached=True, salt=salt,
            holder=holder(workers.decode[0], len(ids)) if turn else None,
        )
        expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
        num_cached = (len(ids) - 7 - 1) // BLOCK * BLOCK if turn else 0
        check(copy, expected, num_cached)
        assert copy.handoff is not None
        assert copy.handoff.bytes == (len(ids) - num_cached) * engine.layout.bytes_per_token
        assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
        ids = [*ids, *copy.token_ids, *text[40:47]]
    again = await workers.players[0].run(ids[:-7], message(tokenizer, params(2)), cached=True, salt=salt)
    assert again.cached_tokens == (len(ids) - 28) // BLOCK * BLOCK, "what was fetched is not found"
    await workers.until_idle()


@pytest.mark.parametrize(("num_there", "num_here", "length"), [
    (48, 0, 48), (48, 0, 49), (49, 17, 80), (160, 32, 161), (16, 16, 40), (32, 48, 60),
])
async def test_parts_of_every_size(
    workers: Workers, engine: Engine, tokenizer: Tokenizer, num_there: int, num_here: int, length: int
) -> None:
    """From a prefill worker, of which some is here already; a prompt that is there whole; nothing more than is here."""
    ids, salt = tokenizer.encode(TEXT), f"{num_there} {num_here} {length}"
    await workers.players[0].run(ids[:num_there], message(tokenizer, params(1)), cached=True, salt=salt)
    if num_here:
        await workers.players[1].run(ids[:num_here], message(tokenizer, params(1)), cached=True, salt=salt)
    asked = params(8)
    copy = await workers.players[1].run(
        ids[:length], message(tokenizer, asked), cached=True, salt=salt, holder=holder(workers.prefill[0], length)
    )
    expected = generate(engine, tokenizer, ids[:length], asked, speculate=1, checksums=True)
    check(copy, expected, max(num_there, num_here) // BLOCK * BLOCK)
    await workers.until_idle()


async def test_an_answer_without_mtp_slots_is_computed(
    workers: Workers, engine: Engine, tokenizer: Tokenizer
) -> None:
    """It was made without drafts: a prefill worker takes the prompt's blocks, computes the rest, and drafts go on."""
    ids, salt = tokenizer.encode(TEXT)[:32], "without drafts"
    first = await workers.players[0].run(ids, message(tokenizer, params(40), 0), cached=True, salt=salt)
    ids, asked = [*ids, *first.token_ids], params(9)
    copy = await workers.players[1].run(
        ids, message(tokenizer, asked), cached=True, salt=salt, holder=holder(workers.decode[0], len(ids))
    )
    expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
    check(copy, expected, 32)
    assert (copy.accepted, copy.drafted) == (expected.accepted_tokens, expected.drafted_tokens)
    await workers.until_idle()


@pytest.mark.parametrize("num_emitted", [1, 8, 20])
async def test_a_resume_elsewhere(workers: Workers, engine: Engine, tokenizer: Tokenizer, num_emitted: int) -> None:
    """Prompt and emitted tokens at another worker: the same tokens follow; only those of the prompt count as cached."""
    ids, asked, salt = tokenizer.encode(TEXT)[:40], params(24), f"resume {num_emitted}"
    whole = list(generate(engine, tokenizer, ids, asked).token_ids)
    await workers.players[0].run(ids, message(tokenizer, asked), cached=True, salt=salt)
    copy = await workers.players[1].run(
        ids + whole[:num_emitted], message(tokenizer, asked), num_prompt_tokens=len(ids), cached=True, salt=salt,
        holder=holder(workers.decode[0], len(ids)),
    )
    assert copy.tokens == {index: whole[index] for index in range(num_emitted, 24)}
    assert copy.cached_tokens == 32
    await workers.until_idle()


async def test_who_has_nothing_is_asked_in_vain(workers: Workers, engine: Engine, tokenizer: Tokenizer) -> None:
    """Another salt, another life of the holder, nobody at the address, itself; and nobody is asked for a choice that
    passes the caches by."""
    ids, asked = tokenizer.encode(TEXT)[:70], params(4)
    expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
    await workers.players[0].run(ids, message(tokenizer, params(1)), cached=True, salt="here")
    right = holder(workers.prefill[0], 70)
    for number, (cached, salt, said) in enumerate((
        (True, "elsewhere", right), (False, "here", right), (True, "epoch", pb.PrefixHolder(
            address=right.address, epoch=secrets.token_hex(16), num_blocks=4)),
        (True, "nobody", pb.PrefixHolder(address="127.0.0.1:1", epoch=right.epoch, num_blocks=4)),
        (True, "itself", holder(workers.prefill[1], 70)),
    )):
        copy = await workers.players[1].run(ids, message(tokenizer, asked), cached=cached, salt=salt, holder=said)
        check(copy, expected, 0)
        assert copy.handoff is not None, number
    await workers.until_idle()


@pytest.mark.parametrize("said", [
    {"num_blocks": 0}, {"num_blocks": 5}, {"address": ""}, {"address": "unix:/tmp/x"}, {"epoch": ""},
    {"epoch": "A" * 32},
])
async def test_a_bad_holder_is_refused(workers: Workers, tokenizer: Tokenizer, said: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"address": "127.0.0.1:9", "epoch": "a" * 32, "num_blocks": 4}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await workers.players[0].run(
            tokenizer.encode(TEXT)[:70], message(tokenizer, params(2)), cached=True,
            holder=pb.PrefixHolder(**(fields | said)),
        )
    error = typed_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert "prefix_holder" in error.message
    for player in workers.players:
        for journey_id in list(player.copies):
            await player.release(journey_id)
    await workers.until_idle()


async def test_many_at_once(workers: Workers, engine: Engine, tokenizer: Tokenizer) -> None:
    """Equal and different prompts, from both holders, some of which nobody has: all tokens, and nothing is left."""
    ids, asked = tokenizer.encode(TEXT)[:300], params(6)
    await workers.players[0].run(ids[:280], message(tokenizer, params(1)), cached=True, salt="many")
    lengths = [300 - 23 * (number % 4) for number in range(12)]
    copies = await asyncio.gather(*(
        workers.players[1].run(
            ids[:length], message(tokenizer, asked), cached=True, salt="many",
            holder=holder((workers.prefill[0], workers.decode[0])[number % 2], length),
        )
        for number, length in enumerate(lengths)
    ))
    for length, copy in zip(lengths, copies, strict=True):
        assert copy.failure is None
        assert copy.token_ids == list(generate(engine, tokenizer, ids[:length], asked).token_ids)
    await workers.until_idle()


@pytest.mark.slow
async def test_a_holder_that_is_stopped_costs_the_fetch_its_time(
    engine: Engine, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """SIGSTOP: the prompt is computed after `prefix_fetch_ms`. Meanwhile others go on, and one whose caller goes away
    leaves nothing. Once the holder goes on, nothing is pinned there. Then it is killed, and started anew where it was:
    another life, of which nothing is taken."""
    ids, asked = tokenizer.encode(TEXT)[:70], params(4)
    expected = generate(engine, tokenizer, ids, asked, speculate=1, checksums=True)
    async with started(HASTY, tmp_path, prefill=2) as workers:
        there, player = workers.prefill[0], workers.players[1]
        await workers.players[0].run(ids, message(tokenizer, params(1)), cached=True, salt="stopped")
        there.signal(signal.SIGSTOP)
        late = asyncio.create_task(player.run(
            ids, message(tokenizer, asked), cached=True, salt="stopped", holder=holder(there, 70)
        ))
        left = player.reserve_request(new_journey(), ids, message(tokenizer, asked), cached=True, salt="stopped")
        lease = await player.reserve(left)
        call = player.prefill.Prefill(player.prefill_request(left, lease, holder=holder(there, 70)))
        await asyncio.sleep(0)
        check(await player.run(ids, message(tokenizer, asked), cached=True, salt="other"), expected, 0)
        call.cancel()
        await player.release(left.journey.journey_id)
        check(await late, expected, 0)
        there.signal(signal.SIGCONT)
        await workers.until_idle()
        await there.kill()
        port = int(there.address.rpartition(":")[2])
        for salt in ("killed", "anew"):
            copy = await player.run(
                ids, message(tokenizer, asked), cached=True, salt=salt, holder=holder(there, 70)
            )
            check(copy, expected, 0)
            if salt == "killed":
                anew = await start_process("prefill", "prefill-0", HASTY, tmp_path, port=port)
        await anew.kill()
        await player.until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_drains_serves_who_reads(
    engine: Engine, tokenizer: Tokenizer, tmp_path: Path, role: str
) -> None:
    """drain-with-readers, of a prefix: it ends once nothing is held there any more, and holds nothing new."""
    ids = tokenizer.encode(TEXT)[:70]
    async with started(SETTINGS, tmp_path, prefill=2) as workers:
        player = workers.players[0]
        await player.run(ids, message(tokenizer, params(2)), cached=True)
        worker = workers.decode[0] if role == "decode" else workers.prefill[0]
        channel = connect(worker.address, SECRET)

        async def hold() -> tuple[pb.JourneyRef, pb.HoldReply]:
            ref = pb.JourneyRef(journey_id=new_journey(), attempt=1)
            request = pb.HoldRequest(
                journey=ref, token_ids=ids[:64], lease_ms=50_000,
                block_hashes=block_hashes(ids, fingerprint=engine.fingerprint),
            )
            return ref, await kv_source_stub(channel).Hold(request, timeout=CALL_TIMEOUT_S)

        ref, reply = await hold()
        held = [ref]
        assert (reply.num_blocks, reply.epoch) == (4, worker.epoch)
        for player in workers.players:
            await player.close()
        worker.signal(signal.SIGTERM)
        while True:  # it may not have come to the signal yet
            ref, reply = await hold()
            if not reply.num_blocks:
                break
            held.append(ref)
        assert worker.process.returncode is None
        release = pb.ReleaseRequest(journeys=held, reason="test")
        await worker_stub(channel).Release(release, timeout=CALL_TIMEOUT_S)
        assert await asyncio.wait_for(worker.process.wait(), CALL_TIMEOUT_S) == 0
        await channel.close()
