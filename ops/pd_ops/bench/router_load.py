"""What a router costs: rates and times of its doors in front of stub workers, by CPU time of its process too."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import psutil

from pd_engine.errors import Unavailable
from pd_engine.service.secret import SECRET_ENVIRONMENT, new_secret
from pd_ops.bench.measured_process import Document
from pd_ops.bench.router_client import Door, HttpDoor, Streamed, grpc_door, worker_door

START_TIMEOUT_S = 120.0
ANSWER_TOKENS = 16
CONCURRENCY = 32
NUM_STREAMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterRow:
    """One door. `_per_cpu_s` is by CPU time of the process behind it: what one core gives.

    Attributes:
        requests_per_s, requests_per_cpu_s: answers of 16 tokens, 32 at a time.
        ttft_p50_ms, ttft_p99_ms: at half that rate.
        added_p50_ms, added_p99_ms: the same, less that of the stub itself at that rate.
        tokens_per_s, tokens_per_cpu_s: of 64 streams.
        messages_per_token: of these streams; below 1: some came together, as the router was late.
    """

    door: str
    requests_per_s: float
    requests_per_cpu_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    added_p50_ms: float
    added_p99_ms: float
    tokens_per_s: float
    tokens_per_cpu_s: float
    messages_per_token: float

    def to_json(self) -> Document:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """`seconds`: how long each rate is measured, about. `step_us`: pace of the streams, microseconds a token."""

    seconds: float
    step_us: int
    num_requests: int


@asynccontextmanager
async def _process(module: str, secret: str, *arguments: str) -> AsyncIterator[tuple[Document, psutil.Process]]:
    """What it says on its first line, and the process; killed at the end.

    Raises:
        Unavailable: it has ended instead.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, SECRET_ENVIRONMENT: secret},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise Unavailable(f"{module} has ended with {await process.wait()}")
        yield json.loads(line), psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure_router(effort: Effort) -> list[RouterRow]:
    """gRPC, HTTP, and beside them a gRPC server that sends the same messages and does nothing else."""
    secret = new_secret()
    async with _process("pd_ops.bench.router_stubs", secret) as (stubs, _):
        workers = [{"worker_id": f"{role}-0", "role": role, "address": address} for role, address in stubs.items()]
        settings = {
            "model": "demo", "router": {"grpc_port": 0, "http_port": 0, "max_running_requests": 4096},
            "cluster": {"log_level": "warning"},
        }
        arguments = ("--settings-json", json.dumps(settings), "--workers-json", json.dumps(workers))
        async with (
            _process("pd_router", secret, *arguments) as (addresses, router),
            worker_door(stubs["prefill"], secret) as direct,
            grpc_door(addresses["grpc"]) as grpc,
        ):
            rows = [
                await _measure(name, door, direct, router, effort)
                for name, door in (("gRPC", grpc), ("HTTP", HttpDoor(addresses["http"])))
            ]
            async with (
                _process("pd_ops.bench.router_stubs", secret, "--bare") as (bare, server),
                grpc_door(bare["grpc"]) as door,
            ):
                return [*rows, await _measure("no router, gRPC", door, direct, server, effort)]


async def _measure(name: str, door: Door, direct: Door, router: psutil.Process, effort: Effort) -> RouterRow:
    await _closed_loop(door, CONCURRENCY)  # warm
    cpu_s, begun_s = _cpu_s(router), time.perf_counter()
    await _closed_loop(door, effort.num_requests)
    wall_s, cpu_s = time.perf_counter() - begun_s, _cpu_since(router, cpu_s)
    rate_per_s = effort.num_requests / wall_s / 2
    own_s = await _open_loop(direct, rate_per_s, effort.seconds)
    ttft_s = await _open_loop(door, rate_per_s, effort.seconds)
    tokens_per_s, tokens_per_cpu_s, messages_per_token = await _streams(door, router, effort)
    return RouterRow(
        door=name, requests_per_s=effort.num_requests / wall_s, requests_per_cpu_s=effort.num_requests / cpu_s,
        ttft_p50_ms=1000 * _quantile(ttft_s, 0.5), ttft_p99_ms=1000 * _quantile(ttft_s, 0.99),
        added_p50_ms=1000 * (_quantile(ttft_s, 0.5) - _quantile(own_s, 0.5)),
        added_p99_ms=1000 * (_quantile(ttft_s, 0.99) - _quantile(own_s, 0.99)),
        tokens_per_s=tokens_per_s, tokens_per_cpu_s=tokens_per_cpu_s, messages_per_token=messages_per_token,
    )


async def _closed_loop(door: Door, num_requests: int) -> None:
    left = iter(range(num_requests))

    async def client() -> None:
        for _ in left:
            await door.ask(ANSWER_TOKENS, 0, _nothing)

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))


async def _open_loop(door: Door, rate_per_s: float, seconds: float) -> list[float]:
    """Times to the first token of requests that come at this rate, whatever became of those before."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    asked = []
    for number in range(max(1, round(rate_per_s * seconds))):
        await asyncio.sleep(max(0.0, begun_s + number / rate_per_s - loop.time()))
        asked.append(asyncio.create_task(door.ask(ANSWER_TOKENS, 0, _nothing)))
    return [answer.ttft_s for answer in await asyncio.gather(*asked)]


async def _streams(door: Door, router: psutil.Process, effort: Effort) -> tuple[float, float, float]:
    """Tokens a second, tokens a CPU second of the router, messages a token; while all streams run."""
    num_tokens = max(32, round(1e6 * effort.seconds / effort.step_us))
    count = 0
    started: set[int] = set()
    all_run = asyncio.Event()

    async def stream(number: int) -> Streamed:
        def on_message() -> None:
            nonlocal count
            count += 1
            if number not in started:
                started.add(number)
                if len(started) == NUM_STREAMS:
                    all_run.set()

        return await door.ask(num_tokens, effort.step_us, on_message)

    running = [asyncio.create_task(stream(number)) for number in range(NUM_STREAMS)]
    await asyncio.wait([asyncio.create_task(all_run.wait()), *running], return_when=asyncio.FIRST_COMPLETED)
    count_before, cpu_s, begun_s = count, _cpu_s(router), time.perf_counter()
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    num_messages, cpu_s = max(1, count - count_before), _cpu_since(router, cpu_s)
    wall_s = time.perf_counter() - begun_s
    answers = await asyncio.gather(*running)
    share = sum(answer.num_messages for answer in answers) / (num_tokens * NUM_STREAMS)
    num_seen = num_messages / share
    return num_seen / wall_s, num_seen / cpu_s, share


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _cpu_since(process: psutil.Process, before_s: float) -> float:
    """At least a tick of the kernel's clock, which may not have come where the host is busy."""
    return max(_cpu_s(process) - before_s, 1 / os.sysconf("SC_CLK_TCK"))


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _nothing() -> None:
    """For clients that are not counted."""
