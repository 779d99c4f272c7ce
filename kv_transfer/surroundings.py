"""What a worker takes from around it: time, names, threads, the network and the model. `ProcessSurroundings` are those
of a process of its own; a simulation gives others, and the worker is none the wiser."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import grpc.aio

from kv_transfer.journey import Clock
from kv_transfer.publisher import Publisher
from kv_transfer.transport import PullTransport, SourceTransport
from kv_transfer.transports import pull_transports, source_transports
from pd_engine.cache.arena import Arena
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.model.checkpoint import resolve_model
from pd_engine.service.client import connect
from pd_engine.service.compute import Compute, ComputeThread, Core
from pd_engine.service.identity import StartCost, memory_of, rss_bytes, start_cost
from pd_engine.service.ids import NewId, random_id
from pd_engine.service.lifeline import Lifeline
from pd_engine.service.server import build_server
from pd_engine.settings import Settings
from pd_engine.steps.forward import THE_MODEL, Steps
from pd_engine.steps.warm_up import warm_up

log = logging.getLogger(__name__)

CoreT = TypeVar("CoreT", bound=Core)


class Surroundings(Protocol):
    """Attributes:
    clock: monotonic, of this process.
    new_id: names for what this process makes.
    steps: the ways into the model.
    publisher: what announces pieces beside the event loop.
    """

    @property
    def clock(self) -> Clock: ...

    @property
    def new_id(self) -> NewId: ...

    @property
    def steps(self) -> Steps: ...

    @property
    def publisher(self) -> type[Publisher]: ...

    def server(self) -> grpc.aio.Server:
        """Without services and ports; it checks the cluster secret."""

    def lifeline(self) -> Lifeline | None:
        """By which others hear that this process has ended; None: they do not."""

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """To another worker, with the cluster secret."""

    def compute(
        self, name: str, build: Callable[[Compute[CoreT]], CoreT], on_crash: Callable[[Exception], None]
    ) -> Compute[CoreT]:
        """Where a core that `build` makes will run."""

    def load_engine(self, max_speculate: int, *, also_needed: Mapping[str, int] | None = None) -> Engine:
        """Called where it will compute. Arguments and errors are those of `Engine.load`."""

    def memory(self, engine: Engine, *, host_cache_bytes: int) -> pb.MemoryAudit:
        """As `memory_of`."""

    def rss_bytes(self) -> int:
        """Resident memory of this process."""

    def start_cost(self) -> StartCost:
        """Of this process, until now."""

    def source_transports(self) -> Sequence[SourceTransport]: ...

    def pull_transports(self, arena: Arena) -> Sequence[PullTransport]: ...


class ProcessSurroundings:
    """Args:
    secret: of the cluster.
    host: that the worker listens on.
    """

    clock: Clock = staticmethod(time.monotonic)
    new_id: NewId = staticmethod(random_id)
    publisher = Publisher
    memory = staticmethod(memory_of)
    rss_bytes = staticmethod(rss_bytes)
    start_cost = staticmethod(start_cost)

    def __init__(self, settings: Settings, *, secret: str, host: str, steps: Steps = THE_MODEL) -> None:
        self.steps = steps
        self._settings = settings
        self._secret = secret
        self._host = host

    def server(self) -> grpc.aio.Server:
        return build_server(secret=self._secret)

    def lifeline(self) -> Lifeline | None:
        try:
            return Lifeline(self._host)
        except (OSError, RuntimeError) as error:  # no more files, or threads: the streams tell
            log.warning("no lifeline: %s", error)
            return None

    def open_channel(self, address: str) -> grpc.aio.Channel:
        return connect(address, self._secret)

    def compute(
        self, name: str, build: Callable[[Compute[CoreT]], CoreT], on_crash: Callable[[Exception], None]
    ) -> Compute[CoreT]:
        return ComputeThread(name, build, on_crash)

    def load_engine(self, max_speculate: int, *, also_needed: Mapping[str, int] | None = None) -> Engine:
        settings = self._settings.engine
        engine = Engine.load(
            resolve_model(self._settings.model), settings, max_speculate=max_speculate, also_needed=also_needed
        )
        if engine.ops.device.type == "cuda":  # its kernels take seconds each to compile
            started_s = time.monotonic()
            warm_up(engine, settings.chunk_tokens)
            log.info("kernels compiled in %.1f s", time.monotonic() - started_s)
        return engine

    def source_transports(self) -> Sequence[SourceTransport]:
        return source_transports(self._settings.transfer, secret=self._secret, host=self._host)

    def pull_transports(self, arena: Arena) -> Sequence[PullTransport]:
        return pull_transports(self._settings.transfer, arena, secret=self._secret)
