"""The router as a whole: its doors, its workers, and how it starts and stops."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from pd_engine.contracts import api_pb2, api_pb2_grpc
from pd_engine.errors import PdRelayError
from pd_engine.service.client import connect
from pd_engine.service.server import Health, add_reflection, bind, build_server, host_port
from pd_engine.settings import Settings
from pd_router.callers import Callers
from pd_router.dispatch import Dispatcher, DispatchSettings
from pd_router.grpc_door import SERVICE_NAME, PdRelayService, authorizer
from pd_router.http_server import HttpServer
from pd_router.link_state import WorkerEndpoint
from pd_router.message_bounds import MessageBounds
from pd_router.metrics import Metrics
from pd_router.model_info import ModelInfo
from pd_router.openai import HttpDoor
from pd_router.prefix_index import PrefixIndex
from pd_router.registry import Registry
from pd_router.request import Preparer
from pd_router.status import Status
from pd_router.tls import Tls
from pd_router.trace_export import TraceExporter
from pd_router.tracing import Tracing

__all__ = ["Router", "RouterAddresses", "WorkerEndpoint"]

log = logging.getLogger(__name__)

DEFAULT_DRAIN_S = 1.0
GRPC_GRACE_S = 1.0
FIRST_WORKERS_S = 1.0


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """Each "host:port"."""

    grpc: str
    http: str


class Router:
    """Serves one model over gRPC and HTTP. It needs workers to be of use: `set_workers`.

    Args:
        secret: of the cluster; every call to a worker carries it.
        shares_ports: another process of this user may listen on the same ports, if it says so too: the router that
            replaces this one, or that this one replaces.

    Raises:
        NotFound, InvalidArgument: the model's files are missing or broken.
    """

    def __init__(self, settings: Settings, *, secret: str, shares_ports: bool = False) -> None:
        self._settings = settings
        self._secret = secret
        self._shares_ports = shares_ports
        self._model = ModelInfo.load(settings)
        self._tls = Tls.of(settings.router)
        self._callers = Callers.load(settings.router.api_keys)
        self._started = False

    async def start(self, workers: Sequence[WorkerEndpoint] = ()) -> RouterAddresses:
        """Opens the doors; health is NOT_SERVING until both pools have a ready worker.

        Args:
            workers: that there are already. Nobody gets in before they are known, and answer or have had a second for
                it: who comes to a router that takes the place of another one is not told that there are none.

        Raises:
            InvalidArgument: an address cannot be bound.
        """
        assert not self._started, "a router starts once"
        self._started = True
        self._registry = Registry(
            open_channel=self._open_channel,
            lease_ms=self._settings.transfer.lease_ms,
            silence_ms=self._settings.router.worker_silence_ms,
            max_index_entries=self._settings.router.max_index_entries,
            can_fetch=self._settings.transfer.prefix_fetch_ms > 0,
            may_degrade=self._settings.router.degraded == "local",
        )
        self._metrics = Metrics(
            self._registry, self._model.served_name, lambda: self._dispatcher.num_running,
            lambda: self._dispatcher.num_waiting,
        )
        endpoint = self._settings.router.trace_endpoint
        self._exporter = None if endpoint is None else TraceExporter(endpoint, self._model.served_name)
        self._tracing = Tracing(self._settings.router.kept_traces, self._exporter)
        self._dispatcher = Dispatcher(
            DispatchSettings.of(self._settings),
            registry=self._registry,
            tokenizer=self._model.tokenizer,
            vocab_size=self._model.config.vocab_size,
            metrics=self._metrics,
            tracing=self._tracing,
        )
        self._preparer = Preparer(
            self._model.tokenizer, self._model.defaults, lambda: self._model.limits(self._registry)
        )
        self._first_workers = asyncio.create_task(self._take(workers), name="first workers")
        await asyncio.wait({self._first_workers}, timeout=FIRST_WORKERS_S)
        try:
            return await self._open_doors()
        except BaseException:
            await self._registry.close()
            raise

    async def _take(self, workers: Sequence[WorkerEndpoint]) -> None:
        try:
            await self._registry.set_workers(workers)
        except PdRelayError as error:  # whoever tells them again is told, too
            log.warning("%s", error.message)

    async def _open_doors(self) -> RouterAddresses:
        host = self._settings.router.host
        self._grpc, grpc_port = await self._open_grpc(host)
        door = self._http_door()
        try:
            self._http = HttpServer(
                door.app, host, self._settings.router.http_port,
                shares_port=self._shares_ports, tls=self._tls,
            )
        except BaseException:
            await self._grpc.stop(None)
            raise
        self._http.start()
        self._health_task = asyncio.create_task(self._follow_health(), name="health")
        self._past_task = asyncio.create_task(door.past.keep(), name="past")
        return RouterAddresses(grpc=host_port(host, grpc_port), http=host_port(host, self._http.port))

    async def set_workers(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """All the workers there are, now; see `Registry.set_workers`."""
        await self._registry.set_workers(endpoints)

    @property
    def prefix_index(self) -> PrefixIndex:
        """What is known of the workers' caches."""
        return self._registry.index

    @property
    def num_running(self) -> int:
        """Requests in the system."""
        return self._dispatcher.num_running

    async def settled(self) -> None:
        """Until workers have been told of everything that ended so far, or cannot be."""
        await self._registry.flushed()

    async def stop(self, drain_s: float = DEFAULT_DRAIN_S) -> None:
        """Takes nothing new, lets running requests end for `drain_s`, cancels the rest and releases all they hold."""
        if not self._started:
            return
        self._health_task.cancel()
        await self._health.set_serving(False)
        await self._dispatcher.stop(drain_s)
        await asyncio.gather(self._grpc.stop(GRPC_GRACE_S), self._http.stop())
        await self._close()

    async def hand_over(self, drain_s: float) -> bool:
        """Ends too, where another router serves at the same ports: refuses nothing, but lets go of the ports, tells
        clients to connect anew, and lets running requests end for `drain_s`. Whether all did."""
        assert self._started, "not started"
        self._health_task.cancel()
        await asyncio.gather(self._grpc.stop(drain_s), self._http.stop(math.ceil(drain_s)))
        is_drained = self._dispatcher.num_running == 0
        await self._dispatcher.stop(0.0)
        await self._close()
        return is_drained

    async def _close(self) -> None:
        self._past_task.cancel()
        await self._registry.close()
        if self._exporter is not None:
            await self._exporter.close()

    async def _open_grpc(self, host: str) -> tuple[grpc.aio.Server, int]:
        bounds = MessageBounds.of_context(
            api_pb2.DESCRIPTOR.services_by_name["PdRelay"],
            max_context_length=self._model.max_context_length,
            max_token_chars=self._model.tokenizer.max_token_chars,
        )
        server = build_server(
            secret=None, bounds=bounds, shares_port=self._shares_ports, authorize=authorizer(self._callers)
        )
        status = Status(
            self._model,
            self._registry,
            settings=self._settings,
            num_running=lambda: self._dispatcher.num_running,
            num_waiting=lambda: self._dispatcher.num_waiting,
            metrics=self._metrics,
        )
        service = PdRelayService(self._dispatcher, self._preparer, status, self._callers, self._tracing.book)
        api_pb2_grpc.add_PdRelayServicer_to_server(service, server)
        self._health = Health(server, [SERVICE_NAME])
        add_reflection(server, [SERVICE_NAME])
        port = bind(
            server, host, self._settings.router.grpc_port,
            None if self._tls is None else self._tls.grpc_credentials(),
        )
        await server.start()
        await self._health.set_serving(False)
        return server, port

    def _open_channel(self, address: str) -> grpc.aio.Channel:
        return connect(address, self._secret, keepalive_timeout_ms=self._settings.router.worker_silence_ms)

    def _http_door(self) -> HttpDoor:
        return HttpDoor(
            dispatcher=self._dispatcher,
            preparer=self._preparer,
            model=self._model,
            registry=self._registry,
            metrics=self._metrics,
            callers=self._callers,
        )

    async def _follow_health(self) -> None:
        serving = False
        while True:
            if self._registry.serving != serving:
                serving = self._registry.serving
                await self._health.set_serving(serving)
                log.info("serving" if serving else "not serving: a pool has no ready worker")
            await self._registry.wait_change()
