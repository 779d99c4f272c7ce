"""A worker as a process of its own, without Ray: `python -m prefill_worker --worker-id p0 --settings-json '{}'`.

The cluster secret comes from the environment. When ready it prints one JSON line on stdout (worker_id, role, address,
epoch, pid); logs go to stderr. SIGTERM and SIGINT drain, for a bounded time, and end it; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from pd_engine.errors import EXIT_CHECK_FAILED, EXIT_OK, InvalidArgument, PdRelayError
from pd_engine.service.identity import WorkerAddress
from pd_engine.service.secret import secret_from_environment
from pd_engine.settings import Settings, load_settings

DRAIN_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


class WorkerProcess(Protocol):
    """What `run` needs of either kind of worker."""

    async def start(self) -> WorkerAddress: ...

    async def drain(self, timeout_s: float | None = None) -> bool: ...

    async def stop(self) -> None: ...

    async def wait_crashed(self) -> None: ...


class Build(Protocol):
    def __call__(self, settings: Settings, *, worker_id: str, host: str, secret: str, port: int) -> WorkerProcess: ...


def main(role: str, build: Build, argv: Sequence[str] | None = None) -> int:
    """Runs one worker until it is told to end; returns the exit code."""
    arguments = _parser(role).parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {arguments.worker_id} %(levelname)s %(message)s"
    )
    try:
        settings = load_settings(None, _overrides(arguments.settings_json))
        logging.getLogger().setLevel(settings.cluster.log_level.upper())
        worker = build(
            settings, worker_id=arguments.worker_id, host=arguments.host, secret=secret_from_environment(),
            port=arguments.port,
        )
        return asyncio.run(_run(worker, role, arguments))
    except PdRelayError as error:
        print(f"{role} worker: {error.message}", file=sys.stderr)
        return error.exit_code


def _parser(role: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{role}_worker", description=f"Runs one {role} worker without Ray.")
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--settings-json", default="{}", help="settings as one JSON object, over the defaults")
    parser.add_argument("--host", default="127.0.0.1", help="the IP address that it listens on and tells others")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--drain-timeout-s", type=float, default=DRAIN_TIMEOUT_S)
    parser.add_argument("--end-with-stdin", action="store_true", help="end when stdin is closed, as a child should")
    return parser


def _overrides(text: str) -> dict[str, object]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--settings-json is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidArgument("--settings-json must be one object")
    return data


async def _run(worker: WorkerProcess, role: str, arguments: argparse.Namespace) -> int:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, ending)
    if arguments.end_with_stdin:
        _end_with_stdin(loop, lambda: os._exit(EXIT_OK))
    try:
        address = await worker.start()
        line = {
            "worker_id": arguments.worker_id, "role": role, "address": address.address, "epoch": address.epoch,
            "pid": os.getpid(),
        }
        print(json.dumps(line), flush=True)
        return await _until_ended(worker, ending, arguments.drain_timeout_s)
    finally:
        await worker.stop()


async def _until_ended(worker: WorkerProcess, ending: asyncio.Event, drain_timeout_s: float) -> int:
    told = asyncio.create_task(ending.wait())
    crashed = asyncio.create_task(worker.wait_crashed())
    await asyncio.wait({told, crashed}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    crashed_already = crashed.done()
    crashed.cancel()
    await asyncio.gather(told, crashed, return_exceptions=True)
    if crashed_already:
        return EXIT_CHECK_FAILED
    if not await worker.drain(drain_timeout_s):
        log.warning("not everything had ended after %.0f s of draining", drain_timeout_s)
    return EXIT_OK


def _on_signal(ending: asyncio.Event) -> None:
    if ending.is_set():
        log.warning("told to end twice: ending at once")
        os._exit(EXIT_CHECK_FAILED)
    ending.set()


def _end_with_stdin(loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    def on_readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            log.info("stdin is closed: the parent has gone")
            end()

    loop.add_reader(sys.stdin.fileno(), on_readable)
