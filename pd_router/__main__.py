"""A router as a process of its own: `python -m pd_router --settings-json JSON --workers-json JSON`.

The cluster secret comes from the environment (pd_engine.service.secret). On stdout there is one JSON line,
{"grpc": "host:port", "http": "host:port"}, once the workers have been told. With --follow-stdin every line of stdin
is a new list of workers, answered by a line {"workers": n} or {"error": ...}; the router stops at the end of stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

import uvloop
from pydantic import ValidationError

from pd_engine.errors import EXIT_OK, InvalidArgument, PdRelayError
from pd_engine.service.secret import secret_from_environment
from pd_engine.settings import Settings
from pd_router.garbage import spare_what_stays
from pd_router.link_state import WorkerEndpoint
from pd_router.server import Router

MAX_LINE_BYTES = 16 * 1024 * 1024


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pd_router", description="Runs a router until SIGTERM or SIGINT.")
    parser.add_argument("--settings-json", default="{}", help="settings as JSON; absent keys have their defaults")
    parser.add_argument(
        "--workers-json", default="[]",
        help='[{"worker_id": ..., "role": ..., "address": ...}]; "is_expected": false for one that has ended',
    )
    parser.add_argument("--follow-stdin", action="store_true", help="read lists of workers from stdin")
    arguments = parser.parse_args(argv)
    try:
        settings = _parse_settings(arguments.settings_json)
        logging.basicConfig(level=settings.cluster.log_level.upper(), stream=sys.stderr)
        workers = parse_workers(arguments.workers_json)
        uvloop.run(_serve(settings, workers, follow_stdin=arguments.follow_stdin))
    except PdRelayError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def parse_workers(text: str) -> list[WorkerEndpoint]:
    """Raises:
    InvalidArgument: it is no JSON list of objects with worker_id, role and address, and is_expected or not.
    """
    try:
        return [WorkerEndpoint(**item) for item in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"workers must be a JSON list of worker_id, role, address: {error}") from None


def _parse_settings(text: str) -> Settings:
    try:
        return Settings.model_validate_json(text)
    except ValidationError as error:
        raise InvalidArgument(f"settings: {error}") from None


async def _serve(settings: Settings, workers: list[WorkerEndpoint], *, follow_stdin: bool) -> None:
    router = Router(settings, secret=secret_from_environment())
    addresses = await router.start()
    spare_what_stays()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await router.set_workers(workers)
        _print({"grpc": addresses.grpc, "http": addresses.http})
        following = asyncio.create_task(_follow_stdin(router, stop)) if follow_stdin else None
        await stop.wait()
        if following is not None:
            following.cancel()
    finally:
        await router.stop()


async def _follow_stdin(router: Router, stop: asyncio.Event) -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            workers = parse_workers(line.decode("utf-8", errors="replace"))
            await router.set_workers(workers)
            _print({"workers": len(workers)})
        except PdRelayError as error:
            _print({"error": {"code": error.code.value, "message": error.message}})
    stop.set()


def _print(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    sys.exit(main())
