"""Hears that a worker's process has ended, before its streams do (`pd_engine.service.lifeline`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from pd_engine.errors import Unavailable

log = logging.getLogger(__name__)


async def until_ended(worker_id: str, address: str, port: int) -> None:
    """Of the worker at `address`, "host:port". Waits for ever where its lifeline cannot be reached: its streams tell.

    Raises:
        Unavailable: its process has ended.
    """
    try:
        reader, writer = await asyncio.open_connection(address.rpartition(":")[0].strip("[]"), port)
    except OSError as error:
        log.warning("worker %s: no lifeline: %s", worker_id, error)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it") from None
    try:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # a reset is an end too
            await reader.read(1)
    finally:
        writer.close()
    raise Unavailable(f"worker {worker_id} has ended its lifeline: its process is gone")
