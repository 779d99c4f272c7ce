"""What a worker of the simulation takes from around it: the `Surroundings` of a simulated process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from kv_transfer.publisher import Publisher
from kv_transfer.transport import PullTransport, SourceTransport
from kv_transfer.transports.loopback import FaultPlan, LoopbackSource
from pd_engine.cache.arena import Arena
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.engine import Engine
from pd_engine.service.client import SecretChannel
from pd_engine.service.compute import Compute, Core
from pd_engine.service.identity import StartCost
from pd_engine.service.ids import NewId
from pd_engine.steps.forward import Steps
from pd_ops.simulation.calls import MemoryChannel
from pd_ops.simulation.network import Network
from pd_ops.simulation.process import Process
from pd_ops.simulation.server import MemoryServer, Witness
from pd_ops.simulation.threads import LoopCompute, Pace, publisher_class
from pd_ops.simulation.toy import ToyEngine, ToyModel
from pd_ops.simulation.transfers import Places, WatchedPull

SECRET = "the secret of a simulated cluster"

CoreT = TypeVar("CoreT", bound=Core)


@dataclass(kw_only=True, eq=False)
class SimulatedSurroundings:
    """Attributes:
    faults: of the worker's fetches.
    num_blocks: of its arena.
    complain: told of what must never be.
    engine: once it is loaded.
    """

    process: Process
    network: Network
    places: Places
    witness: Witness
    pace: Pace
    faults: FaultPlan
    num_blocks: int
    new_id: NewId
    complain: Callable[[str], None]
    engine: ToyEngine | None = None

    def __post_init__(self) -> None:
        self.publisher: type[Publisher] = publisher_class(self.pace)
        self.steps: Steps = ToyModel(self.complain, self.pace.worked_s, self.pace.note_step).steps

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def server(self) -> grpc.aio.Server:
        return MemoryServer(self.network, SECRET, self.witness)

    def lifeline(self) -> None:
        """A process that ends there closes all it has at once."""

    def open_channel(self, address: str) -> grpc.aio.Channel:
        return SecretChannel(MemoryChannel(self.network, address), SECRET)

    def compute(
        self, name: str, build: Callable[[Compute[CoreT]], CoreT], on_crash: Callable[[Exception], None]
    ) -> Compute[CoreT]:
        return LoopCompute(build, on_crash, self.pace)

    def memory(self, engine: Engine, *, host_cache_bytes: int) -> pb.MemoryAudit:
        return pb.MemoryAudit()

    def rss_bytes(self) -> int:
        return 0

    def start_cost(self) -> StartCost:
        return StartCost(seconds=0.0, cpu_seconds=0.0)

    def load_engine(self, max_speculate: int, *, also_needed: Mapping[str, int] | None = None) -> Engine:
        self.engine = ToyEngine(self.num_blocks)
        return self.engine

    def source_transports(self) -> Sequence[SourceTransport]:
        return [ServedBy(self.process, self.places, LoopbackSource(self.places.network, self.new_id))]

    def pull_transports(self, arena: Arena) -> Sequence[PullTransport]:
        engine = self.engine
        assert engine is not None, "the engine is loaded before its transports are made"
        return [
            WatchedPull(
                puller=self.process, network=self.network, places=self.places, arena=arena, pool=engine.pool,
                plan=self.faults, latency_s=self.pace.hop_s, complain=self.complain,
            )
        ]


class ServedBy:
    """A loopback source of a process."""

    name = LoopbackSource.name

    def __init__(self, process: Process, places: Places, source: LoopbackSource) -> None:
        self._process = process
        self._places = places
        self._source = source
        self.metadata = source.metadata
        self.stop = source.stop

    async def start(self, arena: Arena, epoch: str, authorize: Callable[[str], frozenset[int] | None]) -> None:
        self._places.served[epoch] = self._process
        await self._source.start(arena, epoch, authorize)
