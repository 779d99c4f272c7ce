"""A router and workers as processes of their own, without Ray: what a measurement of handoffs needs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pd_engine.errors import Unavailable
from pd_engine.service.secret import SECRET_ENVIRONMENT, new_secret
from pd_engine.settings import Settings
from pd_ops.bench.measured_process import Document

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
LOG_TAIL_CHARS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A worker: its role, and the core that it is bound to; None: any."""

    role: str
    core: int | None = None


ONE_OF_EACH = (Seat(role="prefill"), Seat(role="decode"))


@asynccontextmanager
async def served(settings: Settings, log_directory: Path) -> AsyncIterator[str]:
    """The gRPC address of a router with one prefill and one decode worker; all of them end with the context.

    Raises:
        Unavailable: one of them did not start.
    """
    async with running(settings, log_directory, ONE_OF_EACH) as doors:
        yield doors["grpc"]


@asynccontextmanager
async def running(settings: Settings, log_directory: Path, seats: Sequence[Seat]) -> AsyncIterator[Document]:
    """The addresses of a router, `grpc` and `http`, with these workers; all of them end with the context.

    Raises:
        Unavailable: one of them did not start.
    """
    secret = new_secret()
    text = settings.model_dump_json()
    async with AsyncExitStack() as stack:
        workers: list[Document] = []
        for seat in seats:
            worker_id = f"{seat.role}-{sum(worker['role'] == seat.role for worker in workers)}"
            command = ["-m", f"{seat.role}_worker", "--worker-id", worker_id, "--settings-json", text,
                       "--end-with-stdin"]
            ready = await stack.enter_async_context(
                _process(command, secret, log_directory / f"{worker_id}.log", seat.core)
            )
            workers.append({"worker_id": worker_id, "role": seat.role, "address": ready["address"]})
        command = [
            "-m", "pd_router", "--settings-json", text, "--workers-json", json.dumps(workers), "--follow-stdin",
        ]
        yield await stack.enter_async_context(_process(command, secret, log_directory / "router.log"))


@asynccontextmanager
async def _process(
    arguments: Sequence[str], secret: str, log: Path, core: int | None = None
) -> AsyncIterator[Document]:
    """What a process says when it is ready; it ends when its standard input does, and at the latest is killed."""
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *bound_to(core), sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=stderr, start_new_session=True,
            env={**os.environ, SECRET_ENVIRONMENT: secret, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise Unavailable(f"{log.stem} did not start: {log_tail(log)}")
        ready: Document = json.loads(line)
        yield ready
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def bound_to(core: int | None) -> list[str]:
    """Words before a command that bind it to a core."""
    return [] if core is None else ["taskset", "--cpu-list", str(core)]


def log_tail(log: Path) -> str:
    """The end of what it printed."""
    return " ".join(log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:].split())
