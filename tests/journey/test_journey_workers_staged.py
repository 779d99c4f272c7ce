"""Workers whose caches lie apart from the memory that transports see, as on a GPU: what one process gives, over every
way that blocks take: handoff, prefixes of other workers, local prefill, host memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.generate import Generation, generate
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.identity import WorkerAddress
from pd_engine.settings import load_settings
from pd_engine.text.tokenizer import Tokenizer
from prefill_worker.worker import PrefillWorker
from support.cluster import SECRET
from support.leaks import assert_nothing_left
from support.player import Copy, Player, sampling_message
from support.staged import staged_engines

BLOCK = 16
SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 2, "chunk_tokens": 32}, "transfer": {"lease_ms": 60_000, "prefix_fetch_ms": 20_000},
    "decode": {"max_batch": 16, "projected_tokens": 16, "adaptive_speculation": False},
}


@asynccontextmanager
async def staged_workers(
    settings: dict[str, Any], num_prefill: int = 1
) -> AsyncIterator[tuple[list[Player], list[WorkerAddress]]]:
    """A player a prefill worker, all with the same decode worker; and the addresses of all, the decode worker's last.
    Nothing is left at the end."""
    parsed = load_settings(None, settings)
    async with assert_nothing_left():
        workers: list[PrefillWorker | DecodeWorker] = [
            PrefillWorker(parsed, worker_id=f"prefill-{number}", host="127.0.0.1", secret=SECRET)
            for number in range(num_prefill)
        ]
        workers.append(DecodeWorker(parsed, worker_id="decode-0", host="127.0.0.1", secret=SECRET))
        try:
            with staged_engines():
                addresses = [await worker.start() for worker in workers]
            players = [Player(address.address, addresses[-1].address, SECRET) for address in addresses[:-1]]
            for player in players:
                await player.open()
            yield players, addresses
            for player in players:
                await player.until_idle()
                await player.close()
        finally:
            for worker in reversed(workers):
                await worker.stop()
            workers.clear()
            del worker


def params(seed: int, max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=0.95, top_k=-1, seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=1)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [5 + (7 + 2 * seed) * number % 900 for number in range(length)]


def alone(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], asked: Sequence[SamplingParams]
) -> list[Generation]:
    """By one process, in shared memory."""
    assert not engine.arena.is_staged
    return [
        generate(engine, tokenizer, ids, each, speculate=1, checksums=True)
        for ids, each in zip(prompts, asked, strict=True)
    ]


def check(copy: Copy, expected: Generation) -> None:
    assert copy.failure is None
    assert copy.token_ids == list(expected.token_ids)
    received = [copy.logprobs[index] for index in sorted(copy.logprobs)]
    assert received == [(item.logprob, item.top) for item in expected.logprobs]
    report = copy.local_prefill or copy.handoff
    assert report is not None
    sums = zip(report.block_checksums, expected.prompt_checksums, strict=True)
    assert all(moved in (0, wanted) for moved, wanted in sums)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_handoffs(engine: Engine, tokenizer: Tokenizer, transport: str) -> None:
    lengths, settings = [1, 17, 70], {**SETTINGS, "transfer": {"transport": transport}}
    prompts, asked = [prompt(length) for length in lengths], [params(length) for length in lengths]
    async with staged_workers(settings) as ([player], _):
        copies = await asyncio.gather(*(
            player.run(ids, sampling_message(each, [], 1)) for ids, each in zip(prompts, asked, strict=True)))
    for copy, expected in zip(copies, alone(engine, tokenizer, prompts, asked), strict=True):
        check(copy, expected)
        assert copy.handoff is not None
        assert all(copy.handoff.block_checksums)


async def test_prefixes_of_both_pools_and_local_prefill(engine: Engine, tokenizer: Tokenizer) -> None:
    """A prompt is computed at one prefill worker, its next turn at the other one with what the decode worker has, and
    the turn after that at the decode worker."""
    async with staged_workers(SETTINGS, num_prefill=2) as (players, addresses):
        ids, turns, copies = prompt(50), [], []
        for turn in range(3):
            turns.append(ids)
            there = pb.PrefixHolder(
                address=addresses[-1].address, epoch=addresses[-1].epoch, num_blocks=len(ids) // BLOCK)
            copies.append(await players[turn % 2].run(
                ids, sampling_message(params(turn), [], 1), cached=True, holder=there if turn == 1 else None,
                local=turn == 2))
            ids = [*ids, *copies[-1].token_ids, *prompt(9, seed=turn)]
    assert copies[0].cached_tokens == 0
    assert all((copy.cached_tokens or 0) >= 48 for copy in copies[1:])
    asked = [params(turn) for turn in range(3)]
    for copy, expected in zip(copies, alone(engine, tokenizer, turns, asked), strict=True):
        check(copy, expected)


async def test_sequences_in_host_memory(engine: Engine, tokenizer: Tokenizer) -> None:
    """Twice as many as there is room for."""
    prompts, asked = [prompt(20, seed) for seed in range(5)], [params(seed, 60) for seed in range(5)]
    async with staged_workers({**SETTINGS, "engine": {"cache_mib": 1, "chunk_tokens": 64}}) as ([player], _):
        copies = await asyncio.gather(*(
            player.run(ids, sampling_message(each, [], 1)) for ids, each in zip(prompts, asked, strict=True)))
        _, load = await player.loads()
    assert load.num_moves_total > 0
    for copy, expected in zip(copies, alone(engine, tokenizer, prompts, asked), strict=True):
        check(copy, expected)
