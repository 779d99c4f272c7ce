"""Workers for journey tests: real processes without Ray, or in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_worker.worker import DecodeWorker
from pd_engine.settings import load_settings
from prefill_worker.worker import PrefillWorker
from support.leaks import assert_nothing_left

SECRET = "a-secret-for-tests-only-0123456789"
START_TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[2]


@dataclass(kw_only=True)
class ProcessWorker:
    """One worker in a process of its own."""

    role: str
    worker_id: str
    address: str
    epoch: str
    pid: int
    process: asyncio.subprocess.Process
    log: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM (it drains), and its exit code; SIGKILL if it takes too long."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            return await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            await self.kill()
            raise


async def start_process(
    role: str, worker_id: str, settings: dict[str, Any], log_dir: Path, *, secret: str = SECRET,
    host: str = "127.0.0.1", port: int = 0,
) -> ProcessWorker:
    """Starts `python -m <role>_worker` and returns when it answers calls. It ends when this process does.

    Raises:
        AssertionError: it ended instead; with the end of its log.
    """
    log = log_dir / f"{worker_id}.log"
    command = [
        sys.executable, "-m", f"{role}_worker", "--worker-id", worker_id, "--host", host, "--port", str(port),
        "--settings-json", json.dumps(settings), "--end-with-stdin",
    ]
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr, cwd=ROOT,
            env={**os.environ, "PD_RELAY_SECRET": secret, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
    if not line:
        code = await process.wait()
        raise AssertionError(f"{worker_id} ended with {code}: {log.read_text()[-2000:]}")
    ready = json.loads(line)
    return ProcessWorker(
        role=role, worker_id=worker_id, address=ready["address"], epoch=ready["epoch"], pid=ready["pid"],
        process=process, log=log,
    )


@contextlib.asynccontextmanager
async def worker_processes(
    settings: dict[str, Any], log_dir: Path, *, prefill: int = 1, decode: int = 1
) -> AsyncIterator[tuple[list[ProcessWorker], list[ProcessWorker]]]:
    """(prefill workers, decode workers) as processes; killed at the end, whatever happened, and with them what a test
    has put in their places in these lists."""
    started = await asyncio.gather(
        *(start_process("prefill", f"prefill-{number}", settings, log_dir) for number in range(prefill)),
        *(start_process("decode", f"decode-{number}", settings, log_dir) for number in range(decode)),
        return_exceptions=True,
    )
    workers = [worker for worker in started if isinstance(worker, ProcessWorker)]
    pools = workers[:prefill], workers[prefill:]
    try:
        failures = [failure for failure in started if isinstance(failure, BaseException)]
        if failures:
            raise failures[0]
        yield pools
    finally:
        await asyncio.gather(*(worker.kill() for worker in [*workers, *pools[0], *pools[1]]))


@contextlib.asynccontextmanager
async def local_workers(settings: dict[str, Any], *, secret: str = SECRET) -> AsyncIterator[tuple[str, str]]:
    """Addresses of one prefill and one decode worker in this event loop (their compute threads are real).

    At the end no file, thread or process may be left, whatever the test did.
    """
    parsed = load_settings(None, dict(settings))
    async with assert_nothing_left():
        prefill = PrefillWorker(parsed, worker_id="prefill-0", host="127.0.0.1", secret=secret)
        decode = DecodeWorker(parsed, worker_id="decode-0", host="127.0.0.1", secret=secret)
        try:
            yield (await prefill.start()).address, (await decode.start()).address
        finally:
            await decode.stop()
            await prefill.stop()
            del prefill, decode  # and with them the arenas, whose mapping goes with their last tensor
