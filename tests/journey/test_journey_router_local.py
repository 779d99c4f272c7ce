"""no-prefill-left, and local prefill by choice: a router over real workers in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import api_pb2_grpc
from pd_engine.engine import Engine
from pd_engine.errors import Unavailable
from pd_engine.generate import generate
from pd_engine.hashing import block_hashes
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import typed_error
from pd_engine.settings import load_settings
from pd_engine.text.tokenizer import Tokenizer
from pd_router.link import WorkerLink
from pd_router.link_state import LinkState
from pd_router.server import Router, WorkerEndpoint
from support.cluster import SECRET, ProcessWorker, start_process, worker_processes
from support.leaks import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 8, "chunk_tokens": 64}, "decode": {"adaptive_speculation": False},
    "router": {"grpc_port": 0, "http_port": 0, "max_attempts": 8},
}


@dataclass
class Lab:
    """Attributes:
    prefill: the only prefill worker's present life.
    """

    router: Router
    prefill: ProcessWorker
    decode: ProcessWorker
    api: Any
    http: httpx.AsyncClient
    log_dir: Path

    def link(self, worker: ProcessWorker) -> WorkerLink:
        link = self.router._registry.link(worker.worker_id)
        assert link is not None
        return link

    async def kill_prefill(self) -> None:
        await self.prefill.kill()
        await until(lambda: self.link(self.prefill).state is LinkState.LOST)

    async def restart_prefill(self) -> None:
        """On its old address, as a worker that returns, unless it lives; it gets prompts then."""
        if self.prefill.process.returncode is not None:
            port = int(self.prefill.address.rpartition(":")[2])
            self.prefill = await start_process("prefill", self.prefill.worker_id, SETTINGS, self.log_dir, port=port)
        await until(lambda: self.link(self.prefill).takes_work and self.link(self.decode).takes_work)

    async def ask(self, prompt: list[int], asked: SamplingParams, **fields: Any) -> api.GenerateComplete:
        sampling = api.SamplingParams(
            temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed, max_tokens=asked.max_tokens,
            ignore_eos=True, logprobs=asked.logprobs, repetition_penalty=asked.repetition_penalty,
            frequency_penalty=asked.frequency_penalty, min_tokens=asked.min_tokens,
        )
        request = api.GenerateRequest(
            tokenized=api.TokenizedInput(input_ids=prompt), sampling_params=sampling, **fields
        )
        try:
            [response] = [response async for response in self.api.Generate(request)]
        except grpc.aio.AioRpcError as error:
            raise typed_error(error) from None
        return response.complete

    async def until_idle(self) -> None:
        """Every worker that is alive holds nothing, and says so."""
        await until(lambda: self.router.num_running == 0)
        await self.router.settled()
        while True:
            loads = (await self.api.GetLoads(api.GetLoadsRequest())).loads
            if all(
                load.num_blocks_free == load.num_blocks_total
                and not (load.num_leases or load.num_pins or load.num_running or load.queued_prefill_tokens)
                for load in loads
            ):
                return
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    log_dir = tmp_path_factory.mktemp("workers")
    async with worker_processes(SETTINGS, log_dir) as ([prefill], [decode]):
        router = Router(load_settings(None, dict(SETTINGS)), secret=SECRET)
        addresses = await router.start()
        lab = None
        try:
            await router.set_workers([WorkerEndpoint(w.worker_id, w.role, w.address) for w in (prefill, decode)])
            async with (
                grpc.aio.insecure_channel(addresses.grpc) as channel,
                httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=60) as http,
            ):
                lab = Lab(router, prefill, decode, api_pb2_grpc.PdRelayStub(channel), http, log_dir)
                yield lab
        finally:
            await router.stop(drain_s=0)
            if lab is not None and lab.prefill is not prefill:
                await lab.prefill.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def lab(started: Lab) -> AsyncIterator[Lab]:
    """With its prefill worker, whatever the test before has left."""
    await started.restart_prefill()
    yield started
    await started.until_idle()


def params(seed: int, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=0.95, top_k=-1, seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=0,
        repetition_penalty=1.2, frequency_penalty=0.3,
    )


def prompt(seed: int, num_tokens: int = 70) -> list[int]:
    return [5 + (seed * 131 + position * 7) % 900 for position in range(num_tokens)]


def check_equal(
    complete: api.GenerateComplete, engine: Engine, tokenizer: Tokenizer, ids: list[int], asked: SamplingParams
) -> None:
    expected = generate(engine, tokenizer, ids, asked, speculate=1)
    assert list(complete.output_ids) == list(expected.token_ids)
    assert complete.text == expected.text
    assert complete.finish_reason == expected.finish_reason.value
    assert [one.logprob for one in complete.logprobs] == [one.logprob for one in expected.logprobs]
    assert complete.usage.prompt_tokens == len(ids)


async def test_no_prefill_left(lab: Lab, engine: Engine, tokenizer: Tokenizer) -> None:
    """Killed while streams run: these and all that come go on with the same tokens, and once it returns prompts are
    handed over again."""
    before = await lab.ask(prompt(0), params(0))
    assert before.HasField("handoff")
    cases = [(prompt(seed, 40 + 30 * seed), params(seed, 60 if seed < 4 else 20)) for seed in range(1, 8)]
    running = [asyncio.create_task(lab.ask(*case)) for case in cases[:4]]
    await until(lambda: lab.router.num_running == 4 or any(one.done() for one in running))
    await lab.kill_prefill()
    later = await asyncio.gather(*(lab.ask(*case) for case in cases[4:]))
    for complete, case in zip([*await asyncio.gather(*running), *later], cases, strict=True):
        check_equal(complete, engine, tokenizer, *case)
    assert all(complete.local_prefill.worker == lab.decode.worker_id for complete in later)
    only = await lab.ask(prompt(9), params(9, 1))
    check_equal(only, engine, tokenizer, prompt(9), params(9, 1))
    assert (await lab.http.get("/health")).status_code == 200
    await lab.until_idle()
    await lab.restart_prefill()
    after = await lab.ask(prompt(8), params(8))
    check_equal(after, engine, tokenizer, prompt(8), params(8))
    assert after.HasField("handoff")
    assert not after.HasField("local_prefill")


async def test_no_prefill_left_and_no_degraded_service(lab: Lab, engine: Engine, tokenizer: Tokenizer) -> None:
    """By another router over the same workers: unavailable at once, nothing asked of the decode worker, and service as
    ever once a prefill worker returns."""
    settings = {**SETTINGS, "router": {**SETTINGS["router"], "degraded": "refuse"}}
    router = Router(load_settings(None, settings), secret=SECRET)
    addresses = await router.start()
    try:
        async with grpc.aio.insecure_channel(addresses.grpc) as channel:
            refusing = replace(lab, router=router, api=api_pb2_grpc.PdRelayStub(channel))
            endpoints = [WorkerEndpoint(w.worker_id, w.role, w.address) for w in (lab.prefill, lab.decode)]
            await router.set_workers(endpoints)
            await until(lambda: all(link.takes_work for link in router._registry.links()))
            await refusing.kill_prefill()
            for max_tokens in (1, 24):
                with pytest.raises(Unavailable, match="prefill: no worker is ready"):
                    await refusing.ask(prompt(40), params(40, max_tokens))
            decode = router._registry.link(lab.decode.worker_id)
            assert decode is not None
            assert not decode.passengers
            await until(lambda: lab.link(lab.prefill).state is LinkState.LOST)
            await lab.restart_prefill()
            await until(lambda: refusing.link(lab.prefill).takes_work)
            after = await refusing.ask(prompt(41), params(41))
            check_equal(after, engine, tokenizer, prompt(41), params(41))
            assert after.HasField("handoff")
            await refusing.until_idle()
    finally:
        await router.stop(drain_s=0)


async def test_a_next_turn_with_little_new_is_computed_where_the_answer_is(
    lab: Lab, engine: Engine, tokenizer: Tokenizer
) -> None:
    ids, asked = prompt(20, 64), params(20, 33)
    first = await lab.ask(ids, asked)
    assert first.HasField("handoff")
    turn = [*ids, *first.output_ids, *prompt(21, 6)]
    num_cached = (64 + 32) // BLOCK * BLOCK
    hashes = block_hashes(turn, fingerprint=engine.fingerprint)
    await until(lambda: lab.router.prefix_index.held(hashes).get(lab.decode.worker_id, 0) == num_cached // BLOCK)
    request = api.GenerateRequest(tokenized=api.TokenizedInput(input_ids=turn))
    report = await lab.api.Explain(request)
    assert report.HasField("break_even_tokens") or report.kind == "local"
    second = await lab.ask(turn, params(22), placement=api.Placement(
        prefill_worker=lab.decode.worker_id, decode_worker=lab.decode.worker_id
    ))
    check_equal(second, engine, tokenizer, turn, params(22))
    assert second.local_prefill.worker == lab.decode.worker_id
    assert second.usage.cached_tokens in (num_cached, num_cached - BLOCK), "MTP's slots of the last one may lack"


async def test_where_the_prefill_pool_has_a_queue_a_short_rest_is_not_sent_there(
    lab: Lab, engine: Engine, tokenizer: Tokenizer
) -> None:
    """By cost alone: the prefill worker is said to be busy, and nobody decodes beside it."""
    ids = prompt(30, 64)
    first = await lab.ask(ids, params(30, 33))
    turn = [*ids, *first.output_ids, *prompt(31, 6)]
    hashes = block_hashes(turn, fingerprint=engine.fingerprint)
    await until(lambda: lab.router.prefix_index.held(hashes).get(lab.decode.worker_id, 0) >= 5)
    link = lab.link(lab.prefill)
    assigned_at = link.assign_tokens(100_000)
    try:
        second = await lab.ask(turn, params(32))
    finally:
        link.note_computed(100_000, assigned_at)
    check_equal(second, engine, tokenizer, turn, params(32))
    assert second.local_prefill.worker == lab.decode.worker_id
    assert not second.HasField("handoff")
    long = await lab.ask([*ids, *prompt(33, 80)], params(34))
    assert long.HasField("handoff"), "what is new is too long"
