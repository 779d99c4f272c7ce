"""A router over real workers in processes of their own, and what a client of it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import api_pb2_grpc
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.client import typed_error
from pd_engine.settings import load_settings
from pd_router.server import Router, WorkerEndpoint
from support.cluster import SECRET, ProcessWorker, start_process
from support.leaks import until

CONTEXT = 400
WORKERS: dict[str, Any] = {
    "engine": {"cache_mib": 16, "chunk_tokens": 64, "max_context_length": CONTEXT},
    "decode": {"adaptive_speculation": False},
}


@dataclass
class Lab:
    """A started router, its workers, and a stub of its gRPC door."""

    router: Router
    prefill: list[ProcessWorker]
    decode: list[ProcessWorker]
    api: Any
    http: httpx.AsyncClient
    log_dir: Path

    async def tell_workers(self) -> None:
        await self.router.set_workers(
            [WorkerEndpoint(w.worker_id, w.role, w.address) for w in self.prefill + self.decode]
        )

    async def restart(self, worker: ProcessWorker) -> None:
        """A new life on the old address."""
        fresh = await start_process(
            worker.role, worker.worker_id, WORKERS, self.log_dir, port=int(worker.address.rpartition(":")[2])
        )
        for pool in (self.prefill, self.decode):
            for index, known in enumerate(pool):
                if known is worker:
                    pool[index] = fresh

    async def generate(
        self, prompt: list[int], asked: SamplingParams, *, on_token: Callable[[], None] = lambda: None, **fields: Any
    ) -> api.GenerateComplete:
        """The last message; the chunks before it must give the same tokens and text."""
        ids: list[int] = []
        text = ""
        try:
            async for response in self.api.Generate(request(prompt, asked, **fields)):
                if response.HasField("complete"):
                    assert (ids, text) == (list(response.complete.output_ids), response.complete.text)
                    return response.complete
                assert response.chunk.index == len(ids)
                ids += response.chunk.token_ids
                text += response.chunk.text
                for _ in response.chunk.token_ids:
                    on_token()
        except grpc.aio.AioRpcError as error:
            raise typed_error(error) from None
        raise AssertionError("a stream without its last message")

    async def until_ready(self) -> None:
        """The router may place journeys on every worker."""
        await until(lambda: all(link.takes_work for link in self.router._registry.links()))

    async def until_idle(self) -> None:
        """Every worker that is alive holds nothing, and says so."""
        await until(lambda: self.router.num_running == 0)
        await self.router.settled()
        while not await self._is_idle():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)

    def num_journeys(self, worker: ProcessWorker) -> int:
        """That the router has there now."""
        link = self.router._registry.link(worker.worker_id)
        assert link is not None
        return len(link.passengers)

    async def num_retries(self) -> float:
        """Attempts after the first, of all requests so far."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        [value] = [line.split()[1] for line in lines if line.startswith("pdrelay_retries_total{")]
        return float(value)

    async def num_ended(self) -> float:
        """Choices with a terminal state, so far."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("pdrelay_requests_total{"))

    async def _is_idle(self) -> bool:
        reply = await self.api.GetLoads(api.GetLoadsRequest())
        return all(
            load.num_blocks_free == load.num_blocks_total and not load.num_leases and not load.num_pins
            for load in reply.loads
        )


def request(prompt: list[int], asked: SamplingParams, **fields: Any) -> api.GenerateRequest:
    return api.GenerateRequest(
        tokenized=api.TokenizedInput(input_ids=prompt),
        stream=True,
        sampling_params=api.SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            ignore_eos=asked.ignore_eos,
            seed=asked.seed,
            logprobs=asked.logprobs,
            speculate=asked.speculate,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=dict(asked.logit_bias),
            min_tokens=asked.min_tokens,
        ),
        **fields,
    )


async def start_lab(prefill: list[ProcessWorker], decode: list[ProcessWorker], log_dir: Path) -> AsyncIterator[Lab]:
    router = Router(
        load_settings(None, {**WORKERS, "router": {
            "grpc_port": 0, "http_port": 0, "max_attempts": 8, "local_prefill_tokens": 0, "degraded": "refuse",
        }}), secret=SECRET
    )
    addresses = await router.start()
    async with (
        grpc.aio.insecure_channel(addresses.grpc) as channel,
        httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=60) as http,
    ):
        lab = Lab(router, prefill, decode, api_pb2_grpc.PdRelayStub(channel), http, log_dir)
        try:
            await lab.tell_workers()
            await lab.until_ready()
            yield lab
            await lab.until_idle()
        finally:
            await router.stop(drain_s=0)

class Countdown:
    """`over` is set at the tick after so many."""

    def __init__(self, num_ticks: int) -> None:
        self.over = asyncio.Event()
        self._num_left = num_ticks

    def tick(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            self.over.set()
