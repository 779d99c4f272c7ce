"""Hears that a worker's process has ended, before its streams do (`pd_engine.service.lifeline`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from pd_engine.errors import Unavailable

KEEPALIVE_S = 30   # what is between must not take the silent connection for a dead one
SHORTEST_S = 1.0   # a connection that ends sooner, with the port still open, is ended by something between

log = logging.getLogger(__name__)


async def until_ended(worker_id: str, address: str, port: int) -> None:
    """Of the worker at `address`, "host:port". Waits for ever where its lifeline cannot be reached, or where what ends
    it is the way there: its streams tell.

    Raises:
        Unavailable: its process has ended: the connection has, and nobody listens at the port any more.
    """
    host = address.rpartition(":")[0].strip("[]")
    is_reached, num_short = False, 0
    try:
        while num_short < 2:
            num_short = 0 if await _lasts(host, port) else num_short + 1
            is_reached = True
        log.warning("worker %s: its lifeline is ended by something between", worker_id)
    except OSError as error:
        if is_reached and isinstance(error, ConnectionRefusedError):
            raise Unavailable(f"worker {worker_id} has ended its lifeline: its process is gone") from None
        log.warning("worker %s: no lifeline: %s", worker_id, error)
    await asyncio.Event().wait()


async def _lasts(host: str, port: int) -> bool:
    """Until a connection ends. Whether it was of any length.

    Raises:
        OSError: it was refused, or its other end is not reached any more.
    """
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(host, port)
    begun_s = loop.time()
    try:
        line = writer.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        with contextlib.suppress(ConnectionResetError):  # an end too
            await reader.read(1)
    finally:
        writer.close()
    return loop.time() - begun_s >= SHORTEST_S
