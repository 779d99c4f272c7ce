"""A router over real workers with prefix caches: a conversation stays where its beginning is cached, and its tokens are
those of one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import api_pb2_grpc
from pd_engine.engine import Engine
from pd_engine.generate import generate
from pd_engine.hashing import block_hashes
from pd_engine.sampling.params import SamplingParams
from pd_engine.settings import load_settings
from pd_engine.text.tokenizer import Tokenizer
from pd_router.server import Router, WorkerEndpoint
from pd_router.worker_load import WorkerLoad
from support.cluster import SECRET, ProcessWorker, worker_processes
from support.leaks import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
SETTINGS: dict[str, Any] = {
    "engine": {"cache_mib": 8, "chunk_tokens": 64}, "decode": {"adaptive_speculation": False},
    "router": {"grpc_port": 0, "http_port": 0, "local_prefill_tokens": 0}, "transfer": {"prefix_fetch_ms": 60_000},
}
TEXT = "Iterators are objects that return one item after the other, and raise an exception when none is left. " * 4


@dataclass
class Lab:
    router: Router
    workers: list[ProcessWorker]
    api: Any

    async def ask(self, prompt: list[int], **fields: Any) -> api.GenerateComplete:
        """Greedy, twelve tokens."""
        sampling = api.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        request = api.GenerateRequest(
            tokenized=api.TokenizedInput(input_ids=prompt), sampling_params=sampling, **fields
        )
        [response] = [response async for response in self.api.Generate(request)]
        return response.complete

    async def explain(self, prompt: list[int]) -> api.PlacementReport:
        """Where `ask` would go."""
        sampling = api.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        request = api.GenerateRequest(tokenized=api.TokenizedInput(input_ids=prompt), sampling_params=sampling)
        report: api.PlacementReport = await self.api.Explain(request)
        return report

    def num_held(self, worker_id: str, hashes: list[bytes]) -> int:
        return self.router.prefix_index.held(hashes).get(worker_id, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    async with worker_processes(SETTINGS, tmp_path_factory.mktemp("workers"), prefill=2, decode=1) as pools:
        workers = [worker for pool in pools for worker in pool]
        router = Router(load_settings(None, dict(SETTINGS)), secret=SECRET)
        addresses = await router.start()
        try:
            await router.set_workers([WorkerEndpoint(w.worker_id, w.role, w.address) for w in workers])
            await until(lambda: all(link.takes_work for link in router._registry.links()))
            async with grpc.aio.insecure_channel(addresses.grpc) as channel:
                yield Lab(router, workers, api_pb2_grpc.PdRelayStub(channel))
        finally:
            await router.stop(drain_s=0)


@pytest.fixture
def moving_is_cheap(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was measured: a busy machine may take longer to move a block than to compute it."""
    for name, ms in (("prefill_ms_per_token", 1.0), ("move_ms_per_byte", 1e-6)):
        stated = property(lambda load, ms=ms: ms, lambda load, measured: None)
        monkeypatch.setattr(WorkerLoad, name, stated, raising=False)
    for link in lab.router._registry.links():
        link.view = None


async def test_a_conversation_stays_where_it_is_cached(lab: Lab, engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT)
    first = await lab.ask(prompt)
    assert first.usage.cached_tokens == 0
    places = {(first.handoff.prefill_worker, first.handoff.decode_worker)}
    for turn in range(2):
        hashes = block_hashes(prompt, fingerprint=engine.fingerprint)
        prefill_worker, decode_worker = next(iter(places))
        await until(lambda: lab.num_held(prefill_worker, hashes) == len(hashes))  # noqa: B023
        await until(lambda: lab.num_held(decode_worker, hashes) == len(hashes))  # noqa: B023
        prompt = [*prompt, *first.output_ids, *tokenizer.encode(f" In turn {turn} of it, go on.", add_bos=False)]
        foreseen = await lab.explain(prompt)
        answer = await lab.ask(prompt)
        assert (foreseen.prefill_worker, foreseen.decode_worker) == (prefill_worker, decode_worker)
        assert min(c.num_held_blocks for c in foreseen.candidates if c.chosen) >= len(hashes)
        assert answer.usage.cached_tokens >= len(hashes) * BLOCK
        assert answer.handoff.bytes <= (len(prompt) - len(hashes) * BLOCK) * engine.layout.bytes_per_token
        places.add((answer.handoff.prefill_worker, answer.handoff.decode_worker))
        alone = generate(engine, tokenizer, prompt, SamplingParams(
            temperature=0.0, top_p=1.0, top_k=-1, seed=answer.seed, max_tokens=12, ignore_eos=True
        ))
        assert list(answer.output_ids) == list(alone.token_ids)
        first = answer
    assert len(places) == 1


@pytest.mark.usefixtures("moving_is_cheap")
async def test_a_worker_that_has_nothing_fetches_what_another_one_has(
    lab: Lab, engine: Engine, tokenizer: Tokenizer
) -> None:
    """Asked for by name, it takes a long beginning from who has it; the plan says so, and the count is exact."""
    prompt = (tokenizer.encode(TEXT) * 20)[:905]
    first = await lab.ask(prompt, placement=api.Placement(prefill_worker="prefill-0"))
    hashes = block_hashes(prompt, fingerprint=engine.fingerprint)
    await until(lambda: lab.num_held("prefill-0", hashes) == lab.num_held("decode-0", hashes) == len(hashes))
    elsewhere = api.Placement(prefill_worker="prefill-1", report_placement=True)
    answer = await lab.ask(prompt, placement=elsewhere)
    assert (answer.placement.prefix_worker, answer.placement.num_prefix_blocks) == ("decode-0", len(hashes))
    [fetch_ms] = [
        term.ms for c in answer.placement.candidates for term in c.terms
        if (c.worker_id, term.name) == ("prefill-1", "fetch")
    ]
    assert 0 < fetch_ms < answer.placement.ttft_ms
    assert answer.usage.cached_tokens == len(hashes) * BLOCK
    assert list(answer.output_ids) == list(first.output_ids)
    again = await lab.ask(prompt, placement=elsewhere)
    assert (again.placement.prefix_worker, again.usage.cached_tokens) == ("", len(hashes) * BLOCK)


async def test_another_tenant_finds_nothing(lab: Lab, engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Two tenants. " + TEXT)
    first = await lab.ask(prompt)
    assert first.usage.cached_tokens == 0
    hashes = block_hashes(prompt, fingerprint=engine.fingerprint)
    await until(lambda: lab.num_held(first.handoff.prefill_worker, hashes) == len(hashes))
    assert (await lab.ask(prompt)).usage.cached_tokens > 0
    assert (await lab.ask(prompt, cache_salt="other")).usage.cached_tokens == 0
