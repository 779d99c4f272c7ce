"""The gRPC server of one worker process, and the timer beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

import grpc

from pd_engine.service.lifeline import Lifeline
from pd_engine.service.server import Health, add_reflection, bind, host_port

TICK_S = 0.1
STOP_GRACE_S = 0.5

log = logging.getLogger(__name__)


class Endpoint:
    """One life of a worker process on the network. Made anywhere; the rest belongs to one event loop.

    Args:
        epoch: names this life: 32 hexadecimal digits, random.
        make_server, open_lifeline: called when the port is taken, in the event loop.

    Attributes:
        server: to add services to, between `bind` and `serve`.
    """

    server: grpc.aio.Server

    def __init__(
        self, *, host: str, port: int, epoch: str, make_server: Callable[[], grpc.aio.Server],
        service_names: Collection[str], open_lifeline: Callable[[], Lifeline | None],
    ) -> None:
        self.epoch = epoch
        self._host = host
        self._port = port
        self._make_server = make_server
        self._service_names = service_names
        self._open_lifeline = open_lifeline
        self._lifeline: Lifeline | None = None
        self._health: Health | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._serving = False

    def bind(self) -> str:
        """Takes the port and returns "host:port"; calls are answered from `serve` on.

        Raises:
            InvalidArgument: it cannot be bound.
        """
        self.server = self._make_server()
        self._health = Health(self.server, self._service_names)
        add_reflection(self.server, self._service_names)
        address = host_port(self._host, bind(self.server, self._host, self._port))
        self._lifeline = self._open_lifeline()
        return address

    @property
    def lifeline_port(self) -> int:
        """0: there is none."""
        return 0 if self._lifeline is None else self._lifeline.port

    async def serve(self, tick: Callable[[], None], on_crash: Callable[[Exception], None]) -> None:
        """Answers calls, and calls `tick` every `TICK_S`; `on_crash` is told if that raises."""
        await self.server.start()
        self._serving = True
        await self.set_healthy(True)
        self._ticker = asyncio.create_task(_tick_for_ever(tick, on_crash), name="worker-ticks")

    async def set_healthy(self, healthy: bool) -> None:
        assert self._health is not None, "not bound"
        await self._health.set_serving(healthy)

    async def stop(self) -> None:
        """Ends the timer and the server. Safe to call twice, and before `serve`."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        if self._health is not None:
            await self.server.stop(STOP_GRACE_S if self._serving else None)
            self._serving = False
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


async def _tick_for_ever(tick: Callable[[], None], on_crash: Callable[[Exception], None]) -> None:
    try:
        while True:
            tick()
            await asyncio.sleep(TICK_S)
    except Exception as error:
        log.exception("a worker's books are broken")
        on_crash(error)
