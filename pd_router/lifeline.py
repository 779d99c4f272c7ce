"""The connection to a worker's lifeline (`pd_engine.service.lifeline`): by it a router hears that the worker's process
has ended, before its streams do, and knows whether its host still answers, however busy its processes are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from asyncio.trsock import TransportSocket

from pd_engine.errors import Unavailable

KEEPALIVE_S = 1      # the worker's kernel is asked so often; the worker itself need not do anything for it
UNANSWERED_S = 1.5   # since its last answer
MAX_UNANSWERED = 60  # then the connection has ended
SHORTEST_S = 1.0     # a connection that ends sooner, with the port still open, is ended by something between
LAST_ACK_RECV = struct.Struct("=56xI")  # of Linux's struct tcp_info, in milliseconds

log = logging.getLogger(__name__)


class WorkerLifeline:
    """Of the worker at `address`, "host:port", in one of its lives."""

    def __init__(self, worker_id: str, address: str, port: int) -> None:
        self._worker_id = worker_id
        self._host = address.rpartition(":")[0].strip("[]")
        self._port = port
        self._line: TransportSocket | None = None

    def is_unanswered(self) -> bool:
        """Whether its host has answered nothing for a while: it is gone, or the way there is. False where there is no
        connection that would tell."""
        if self._line is None:
            return False
        try:
            told = self._line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK_RECV.size)
        except OSError:  # it has just ended
            return False
        return len(told) == LAST_ACK_RECV.size and LAST_ACK_RECV.unpack(told)[0] >= 1e3 * UNANSWERED_S

    async def until_ended(self) -> None:
        """Waits for ever where the lifeline cannot be reached, or where what ends it is the way there: streams tell.

        Raises:
            Unavailable: its process has ended: the connection has, and nobody listens at the port any more.
        """
        is_reached, num_short = False, 0
        try:
            while num_short < 2:
                num_short = 0 if await self._lasts() else num_short + 1
                is_reached = True
            log.warning("worker %s: its lifeline is ended by something between", self._worker_id)
        except OSError as error:
            if is_reached and isinstance(error, ConnectionRefusedError):
                raise Unavailable(
                    f"worker {self._worker_id} has ended its lifeline: its process is gone"
                ) from None
            log.warning("worker %s: no lifeline: %s", self._worker_id, error)
        await asyncio.Event().wait()

    async def _lasts(self) -> bool:
        """Until a connection ends. Whether it was of any length.

        Raises:
            OSError: it was refused, or its other end is not reached any more.
        """
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        begun_s = loop.time()
        try:
            line = writer.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, KEEPALIVE_S), (socket.TCP_KEEPINTVL, KEEPALIVE_S),
                (socket.TCP_KEEPCNT, MAX_UNANSWERED),
            ):
                line.setsockopt(socket.IPPROTO_TCP, option, value)
            self._line = line
            with contextlib.suppress(ConnectionResetError):  # an end too
                await reader.read(1)
        finally:
            self._line = None
            writer.close()
        return loop.time() - begun_s >= SHORTEST_S
