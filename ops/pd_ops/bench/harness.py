"""A router and a worker of each role as processes of their own, without Ray: what a measurement of handoffs needs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pd_engine.errors import Unavailable
from pd_engine.service.secret import SECRET_ENVIRONMENT, new_secret
from pd_engine.settings import Settings
from pd_ops.bench.measured_process import Document

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
LOG_TAIL_CHARS = 600


@asynccontextmanager
async def served(settings: Settings, log_directory: Path) -> AsyncIterator[str]:
    """The gRPC address of a router with one prefill and one decode worker; all of them end with the context.

    Raises:
        Unavailable: one of them did not start.
    """
    secret = new_secret()
    text = settings.model_dump_json()
    async with AsyncExitStack() as stack:
        workers = []
        for role in ("prefill", "decode"):
            worker_id = f"{role}-0"
            command = ["-m", f"{role}_worker", "--worker-id", worker_id, "--settings-json", text, "--end-with-stdin"]
            ready = await stack.enter_async_context(_process(command, secret, log_directory / f"{worker_id}.log"))
            workers.append({"worker_id": worker_id, "role": role, "address": ready["address"]})
        command = [
            "-m", "pd_router", "--settings-json", text, "--workers-json", json.dumps(workers), "--follow-stdin",
        ]
        ready = await stack.enter_async_context(_process(command, secret, log_directory / "router.log"))
        yield ready["grpc"]


@asynccontextmanager
async def _process(arguments: Sequence[str], secret: str, log: Path) -> AsyncIterator[Document]:
    """What a process says when it is ready; it ends when its standard input does, and at the latest is killed."""
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
            env={**os.environ, SECRET_ENVIRONMENT: secret, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise Unavailable(f"{log.stem} did not start: {_tail(log)}")
        ready: Document = json.loads(line)
        yield ready
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _tail(log: Path) -> str:
    """The end of what it printed."""
    return " ".join(log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:].split())
