"""A router in this process over stub workers, and clients of its doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import api_pb2_grpc
from pd_engine.service.client import typed_error
from pd_engine.settings import Settings
from pd_router.link_state import LinkState
from pd_router.server import Router, WorkerEndpoint
from support.stub_faults import Faults
from support.stub_worker import StubWorker

SECRET = "the-secret-of-this-test"
PROMPT = [11, 22, 33, 44, 55]


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits until it holds; fails loudly if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is another party's state
            await asyncio.sleep(0.005)


def settings(**sections: dict[str, Any]) -> Settings:
    """Free ports, short leases; more keys by section."""
    router = {"grpc_port": 0, "http_port": 0, **sections.pop("router", {})}
    transfer = {"lease_ms": 600, **sections.pop("transfer", {})}
    return Settings.model_validate({"router": router, "transfer": transfer, **sections})


class RouterLab:
    """Attributes:
    prefill, decode: the stubs.
    api: the public gRPC stub. http: a client of the HTTP door.
    """

    def __init__(self, config: Settings) -> None:
        self.router = Router(config, secret=SECRET)
        self.prefill: list[StubWorker] = []
        self.decode: list[StubWorker] = []
        self.grpc_address = ""

    @property
    def stubs(self) -> list[StubWorker]:
        return self.prefill + self.decode

    async def start(self, *, num_prefill: int = 1, num_decode: int = 1, **stub: Any) -> None:
        self.prefill = [StubWorker(f"prefill-{i}", "prefill", secret=SECRET, **stub) for i in range(num_prefill)]
        self.decode = [StubWorker(f"decode-{i}", "decode", secret=SECRET, **stub) for i in range(num_decode)]
        for worker in self.stubs:
            await worker.start()
        addresses = await self.router.start()
        self.grpc_address = addresses.grpc
        self._channel = grpc.aio.insecure_channel(addresses.grpc)
        self.api = api_pb2_grpc.PdRelayStub(self._channel)
        self.http = httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=60, verify=False)
        await self.tell_workers()
        await eventually(lambda: all(link.state is LinkState.READY for link in self.router._registry.links()))

    async def tell_workers(self) -> None:
        await self.router.set_workers(self.endpoints())

    def endpoints(self) -> list[WorkerEndpoint]:
        return [WorkerEndpoint(stub.worker_id, stub.role, stub.address) for stub in self.stubs]

    def forget(self) -> None:
        """What happened so far on the workers, and the faults that were ordered."""
        for worker in self.stubs:
            worker.calls.clear()
            worker.requests.clear()
            worker.arrived.clear()
            worker.faults = Faults()

    async def stop(self) -> None:
        await self.http.aclose()
        await self._channel.close()
        await self.router.stop(drain_s=0)
        for worker in self.stubs:
            await worker.kill()

    async def until_reported_idle(self) -> None:
        """Nothing runs, and the last report of every decode worker says so: placement takes them for alike again."""
        await eventually(lambda: self.router.num_running == 0)
        for stub in self.decode:
            link = self.router._registry.link(stub.worker_id)
            assert link is not None
            load = link.load
            await eventually(lambda stub=stub, load=load: load.num_blocks_free == stub.num_blocks)  # type: ignore[misc]

    async def assert_no_leaks(self) -> None:
        """Nothing is left anywhere, once the workers have been told."""
        await eventually(lambda: self.router.num_running == 0)
        await self.router.settled()
        for worker in self.stubs:
            worker.assert_no_leaks()

    def request(self, prompt: list[int] | None = None, **fields: Any) -> api.GenerateRequest:
        """Greedy, eos ignored; sampling fields by name, others with their own."""
        own = {name: fields.pop(name) for name in list(fields) if name in api.GenerateRequest.DESCRIPTOR.fields_by_name}
        sampling = api.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields})
        if not {"text", "chat", "tokenized"} & own.keys():
            own["tokenized"] = api.TokenizedInput(input_ids=PROMPT if prompt is None else prompt)
        return api.GenerateRequest(**{"sampling_params": sampling, **own})

    async def stream(self, request: api.GenerateRequest) -> AsyncIterator[api.GenerateResponse]:
        """Raises typed errors."""
        try:
            async for response in self.api.Generate(request):
                yield response
        except grpc.aio.AioRpcError as error:
            raise typed_error(error) from None

    async def generate(self, prompt: list[int] | None = None, **fields: Any) -> api.GenerateComplete:
        """The last message; every chunk before it must continue the one before."""
        return await self.complete(self.request(prompt, **fields))

    async def complete(self, request: api.GenerateRequest) -> api.GenerateComplete:
        ids: list[int] = []
        text = ""
        complete = None
        async for response in self.stream(request):
            if response.HasField("chunk"):
                assert response.chunk.index == len(ids), (response.chunk.index, len(ids))
                ids += response.chunk.token_ids
                text += response.chunk.text
            else:
                assert complete is None
                complete = response.complete
        assert complete is not None
        if request.stream and complete.finish_reason != "cancelled":
            assert ids == list(complete.output_ids)
            assert text == complete.text
        return complete


@asynccontextmanager
async def router_lab(config: Settings | None = None, **start: Any) -> AsyncIterator[RouterLab]:
    """A started lab; at the end nothing may be left on any worker."""
    lab = RouterLab(config or settings())
    await lab.start(**start)
    try:
        yield lab
        await lab.assert_no_leaks()
    finally:
        await lab.stop()
