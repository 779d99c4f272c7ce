"""Workers that compute nothing, as a process: what a router costs is measured in front of them.

One prefill and one decode worker, told apart by their ports. The decode worker gives each journey a token a step, all
in one message; the seed of the newest request says how many microseconds a step takes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import Gone
from pd_engine.service.secret import secret_from_environment
from pd_engine.service.server import bind, build_server

HOST = "127.0.0.1"
SERVICE = api.DESCRIPTOR.services_by_name["PdRelay"].full_name
NUM_BLOCKS = 1_000_000
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 1_000, 3_000  # of the demo vocabulary, text all of them
LEASE_MS = 60_000
SOME_ID = "5e" * 16  # of leases and handoffs, which nobody looks at


@dataclass(slots=True)
class _Stream:
    journey: pb.JourneyRef
    index: int
    max_tokens: int


class StubWorker(
    worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.PrefillWorkerServicer, worker_pb2_grpc.DecodeWorkerServicer
):
    def __init__(self, role: str) -> None:
        self.address = ""
        self._role = role
        self._epoch = secrets.token_hex(16)
        self._leases: dict[str, pb.ReserveRequest] = {}
        self._streams: dict[str, _Stream] = {}
        self._begun = asyncio.Event()
        self._step_s = 0.0

    async def start(self, secret: str) -> None:
        server = self._server = build_server(secret=secret)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self, server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, server)
        self.address = f"{HOST}:{bind(server, HOST, 0)}"
        await server.start()

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.WorkerInfo:
        return pb.WorkerInfo(
            worker_id=f"{self._role}-0", role=self._role, epoch=self._epoch, fingerprint="ab" * 16, layout_version=1,
            block_size=16, num_blocks_total=NUM_BLOCKS, bytes_per_token=5_760, dtype="bf16",
            max_context_length=100_000, host=HOST,
        )

    async def Loads(self, request: pb.LoadsRequest, context: Any) -> AsyncIterator[pb.LoadsReply]:
        while True:
            yield pb.LoadsReply(
                epoch=self._epoch, state="ready", num_blocks_free=NUM_BLOCKS, num_blocks_total=NUM_BLOCKS
            )
            await asyncio.sleep(request.interval_ms / 1000)

    async def CacheEvents(self, request: pb.CacheEventsRequest, context: Any) -> AsyncIterator[pb.CacheEventBatch]:
        yield pb.CacheEventBatch(epoch=self._epoch, sequence=1, snapshot=True)
        await asyncio.Event().wait()

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewReply:
        states = [pb.JourneyState(journey=ref, state="running") for ref in request.journeys]
        return pb.RenewReply(epoch=self._epoch, states=states)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        for ref in request.journeys:
            self._leases.pop(ref.journey_id, None)
            self._streams.pop(ref.journey_id, None)
        return pb.ReleaseReply(epoch=self._epoch)

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillReply]:
        yield pb.PrefillReply(source=pb.SourceInfo(epoch=self._epoch, address=self.address, token=SOME_ID))
        yield pb.PrefillReply(first_token=pb.FirstToken(index=0, token_id=FIRST_TOKEN_ID))

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveReply:
        self._leases[request.journey.journey_id] = request
        return pb.ReserveReply(epoch=self._epoch, lease_id=SOME_ID, lease_ms=LEASE_MS)

    async def Pull(self, request: pb.PullRequest, context: Any) -> pb.PullReply:
        lease = self._leases.pop(request.journey.journey_id, None)
        if lease is not None:
            self._step_s = lease.sampling.seed / 1e6
            self._streams[lease.journey.journey_id] = _Stream(lease.journey, 1, lease.sampling.max_tokens)
            self._begun.set()
        return pb.PullReply(epoch=self._epoch)

    async def ComputePrompt(self, request: pb.ComputePromptRequest, context: Any) -> pb.ComputePromptReply:
        raise Gone()  # it does not offer to

    async def Tokens(self, request: pb.TokensRequest, context: Any) -> AsyncIterator[pb.TokensBatch]:
        """Steps, for as long as somebody is there to have a token."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            if not self._streams:
                self._begun.clear()
                await self._begun.wait()
            due_s = max(due_s + self._step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            events = [self._next(stream) for stream in list(self._streams.values())]
            yield pb.TokensBatch(epoch=self._epoch, events=events)

    def _next(self, stream: _Stream) -> pb.TokensEvent:
        event = pb.TokensEvent(
            journey=stream.journey, index=stream.index, token_ids=[FIRST_TOKEN_ID + stream.index % NUM_TOKEN_IDS]
        )
        stream.index += 1
        if stream.index >= stream.max_tokens:
            event.finish_reason = "length"
            self._streams.pop(stream.journey.journey_id, None)
        return event


class BareDoor:
    """Answers `Generate` by itself, with the router's messages: what gRPC alone costs a server."""

    async def Generate(self, request: api.GenerateRequest, context: Any) -> AsyncIterator[api.GenerateResponse]:
        loop = asyncio.get_running_loop()
        due_s, step_s = loop.time(), request.sampling_params.seed / 1e6
        token_ids = [FIRST_TOKEN_ID + index % NUM_TOKEN_IDS for index in range(request.sampling_params.max_tokens)]
        for index, token_id in enumerate(token_ids):
            response = api.GenerateResponse(request_id=request.request_id)
            response.chunk.index = index
            response.chunk.token_ids.append(token_id)
            response.chunk.text = " word"
            yield response
            due_s = max(due_s + step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
        yield api.GenerateResponse(complete=api.GenerateComplete(output_ids=token_ids))

    async def start(self) -> str:
        """Its address."""
        server = self._server = build_server(secret=None)
        handler = grpc.unary_stream_rpc_method_handler(
            self.Generate, api.GenerateRequest.FromString, api.GenerateResponse.SerializeToString
        )
        server.add_registered_method_handlers(SERVICE, {"Generate": handler})
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
        port = bind(server, HOST, 0)
        await server.start()
        return f"{HOST}:{port}"


async def _serve() -> None:
    secret = secret_from_environment()
    if sys.argv[1:] == ["--bare"]:
        bare = BareDoor()
        print(json.dumps({"grpc": await bare.start()}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        return
    workers = {role: StubWorker(role) for role in ("prefill", "decode")}
    for worker in workers.values():
        await worker.start(secret)
    print(json.dumps({role: worker.address for role, worker in workers.items()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve())
