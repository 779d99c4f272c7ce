"""Cheap clients, of the router's doors and of a worker: they count messages, and tell when the first one came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import Unavailable
from pd_engine.service.client import connect, prefill_stub

PROMPT = list(range(100, 164))
GENERATE = f"/{api.DESCRIPTOR.services_by_name['PdRelay'].full_name}/Generate"


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer. `num_messages` counts those that carried tokens."""

    ttft_s: float
    num_messages: int


class Door(Protocol):
    """One way to ask. `on_message` is called with each message that carries tokens."""

    async def ask(self, num_tokens: int, step_us: int, on_message: Callable[[], None]) -> Streamed: ...


@asynccontextmanager
async def grpc_door(address: str) -> AsyncIterator[Door]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield _GrpcDoor(channel)


class _GrpcDoor:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        serialize: Any = api.GenerateRequest.SerializeToString
        self._generate: Any = channel.unary_stream(GENERATE, request_serializer=serialize, response_deserializer=None)

    async def ask(self, num_tokens: int, step_us: int, on_message: Callable[[], None]) -> Streamed:
        request = api.GenerateRequest(
            tokenized=api.TokenizedInput(input_ids=PROMPT), stream=True,
            sampling_params=api.SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=step_us, ignore_eos=True),
        )
        begun_s, ttft_s, count, last = time.perf_counter(), 0.0, 0, b""
        async for message in self._generate(request):
            if not count:
                ttft_s = time.perf_counter() - begun_s
            count += 1
            last = message
            on_message()
        complete = api.GenerateResponse.FromString(last).complete
        _check_num_tokens(len(complete.output_ids), num_tokens)
        return Streamed(ttft_s, count - 1)


class HttpDoor:
    """A connection an answer, as it would cost a pool to keep them."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def ask(self, num_tokens: int, step_us: int, on_message: Callable[[], None]) -> Streamed:
        body = json.dumps({
            "prompt": PROMPT, "stream": True, "temperature": 0, "max_tokens": num_tokens, "seed": step_us,
            "ignore_eos": True,
        }).encode()
        begun_s, ttft_s, count = time.perf_counter(), 0.0, 0
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        try:
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                if not count:
                    ttft_s = time.perf_counter() - begun_s
                count += 1
                on_message()
        finally:
            writer.close()
        if count < 2:
            raise Unavailable("the HTTP door gave no stream")
        return Streamed(ttft_s, count - 1)  # the last one has no token, but the reason why it is over


@asynccontextmanager
async def worker_door(address: str, secret: str) -> AsyncIterator[Door]:
    """Straight to a prefill worker, for its first token: what a router cannot be faster than."""
    async with connect(address, secret) as channel:
        yield _WorkerDoor(channel)


class _WorkerDoor:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._prefill = prefill_stub(channel)

    async def ask(self, num_tokens: int, step_us: int, on_message: Callable[[], None]) -> Streamed:
        request = pb.PrefillRequest(token_ids=PROMPT, num_prompt_tokens=len(PROMPT))
        begun_s, ttft_s = time.perf_counter(), 0.0
        async for reply in self._prefill.Prefill(request):
            if reply.HasField("first_token"):
                ttft_s = time.perf_counter() - begun_s
                on_message()
        return Streamed(ttft_s, 1)


def _check_num_tokens(found: int, expected: int) -> None:
    if found != expected:
        raise Unavailable(f"an answer has {found} tokens where {expected} were asked for")
