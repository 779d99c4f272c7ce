"""The processes of a simulated cluster: workers and routers, as their production classes put them together."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from decode_worker.core import DecodeCore
from decode_worker.worker import DecodeWorker
from kv_transfer.journey import JourneyKey
from pd_engine.contracts import api_pb2_grpc
from pd_engine.service.client import SecretChannel
from pd_engine.service.ids import NewId
from pd_engine.settings import Settings
from pd_ops.simulation.around import SECRET, SimulatedSurroundings
from pd_ops.simulation.calls import MemoryChannel
from pd_ops.simulation.network import Network
from pd_ops.simulation.process import Process
from pd_ops.simulation.server import MemoryServer, Witness
from pd_router.callers import Callers
from pd_router.dispatch import Dispatcher, DispatchSettings
from pd_router.grpc_door import PdRelayService
from pd_router.journey import Journey
from pd_router.link_state import WorkerEndpoint
from pd_router.metrics import Metrics
from pd_router.model_info import ModelInfo
from pd_router.registry import Registry
from pd_router.request import Preparer
from pd_router.status import Status
from pd_router.timeline import Timeline
from pd_router.trace_book import TraceBook
from pd_router.tracing import Tracing
from prefill_worker.worker import PrefillWorker

PORT = 1
SETTINGS = Settings.model_validate({
    "engine": {"block_size": 4, "chunk_tokens": 12},
    "decode": {"max_batch": 3, "speculate": 1, "adaptive_speculation": False, "projected_tokens": 8},
    "router": {
        "worker_silence_ms": 1_500, "max_attempts": 16, "request_timeout_ms": 60_000, "recovery_wait_ms": 15_000,
        "host": "router",
    },
    "transfer": {"lease_ms": 1_000, "fetch_timeout_ms": 800, "max_bytes_in_flight": 192},
})


def address_of(name: str) -> str:
    return f"{name}:{PORT}"


@functools.cache
def model_info() -> ModelInfo:
    """Tokenizer and defaults of the demo model: requests come as token ids, answers as text too."""
    return ModelInfo.load(SETTINGS)


class SimulatedWorker:
    """One life of a worker. Attributes: role: "prefill" or "decode"."""

    def __init__(self, role: str, around: SimulatedSurroundings) -> None:
        self.role = role
        self.process = around.process
        self.around = around
        self._pinned: tuple[object, ...] = ()  # when the books were checked last
        kind = DecodeWorker if role == "decode" else PrefillWorker
        self.worker: DecodeWorker | PrefillWorker = kind(
            SETTINGS, worker_id=self.process.name, host=self.process.name, secret=SECRET, port=PORT, surroundings=around
        )

    async def start(self) -> None:
        await self.worker.start()

    async def end(self, drain_s: float) -> None:
        """As a worker process that is told to."""
        await self.worker.drain(drain_s)
        await self.worker.stop()

    def check_books(self) -> None:
        """Raises AssertionError."""
        engine, source = self.around.engine, self.worker._source
        if engine is None:
            return
        pool, handoffs = engine.pool, () if source is None else tuple(source._book._live.values())
        if pool.has_changed:
            pool.check_integrity()
        elif len(handoffs) == len(self._pinned) and all(map(operator.is_, handoffs, self._pinned)):
            return  # what is pinned is held as it was
        for handoff in handoffs:
            assert all(map(pool.is_held, handoff.block_ids)), f"{handoff.key}: blocks are let go of"
        pool.has_changed, self._pinned = False, handoffs

    def holds(self, journey_id: str) -> list[str]:
        """Owners of blocks here that are of a journey."""
        engine = self.around.engine
        return [] if engine is None else [owner for owner in engine.pool.holdings() if journey_id in owner]

    def serves(self, router_id: str) -> list[str]:
        """Names of what goes on here for a router."""
        core = self.worker._core
        if isinstance(core, DecodeCore):
            return [record.name for record in core._book.open() if record.spec.router_id == router_id]
        jobs = [] if core is None else [job for job in core.jobs.remembered() if job.is_open]
        return [job.name for job in jobs if job.spec.router_id == router_id]

    def leftovers(self) -> list[str]:
        """What is still held here, in words; nothing is left of requests that have ended."""
        engine = self.around.engine
        assert engine is not None, "not started"
        loads = self.worker.loads()
        found = [f"blocks of {owner}: {blocks}" for owner, blocks in engine.pool.holdings().items()]
        counts = {
            "quarantined blocks": engine.pool.num_quarantined, "leases": loads.num_leases, "pins": loads.num_pins,
            "streams": loads.num_streams, "running": loads.num_running, "waiting": loads.num_waiting,
            "bytes in host memory": loads.host_cache_bytes,
        }
        return found + [f"{count} {what}" for what, count in counts.items() if count]

    def leases(self) -> list[JourneyKey]:
        """Handoffs that are not complete."""
        destination = getattr(self.worker, "_destination", None)
        return [] if destination is None else list(destination._book.live_keys())

    def check_cache(self) -> None:
        """Raises AssertionError."""
        core = self.worker._core
        assert core is not None, "not started"
        core._blocks.check_integrity()

    def close(self) -> None:
        if self.around.engine is not None:
            self.around.engine.arena.close()


class WatchedMetrics(Metrics):
    """Tells of journeys that have ended."""

    def __init__(
        self, registry: Registry, model: str, num_running: Callable[[], int], num_waiting: Callable[[], int], *,
        on_end: Callable[[Journey], None],
    ) -> None:
        super().__init__(registry, model, num_running, num_waiting)
        self._on_end = on_end

    def note_end(self, journey: Journey, timeline: Timeline, *, num_prompt_tokens: int) -> None:
        super().note_end(journey, timeline, num_prompt_tokens=num_prompt_tokens)
        self._on_end(journey)


class SimulatedRouter:
    """One life of a router: everything but its HTTP door.

    Args:
        on_end: told of each journey that has ended.
    """

    def __init__(
        self, process: Process, network: Network, witness: Witness, new_id: NewId, on_end: Callable[[Journey], None]
    ) -> None:
        self.process = process
        self._network = network
        self._witness = witness
        router, model = SETTINGS.router, model_info()
        self.registry = Registry(
            open_channel=lambda address: SecretChannel(MemoryChannel(network, address), SECRET),
            lease_ms=SETTINGS.transfer.lease_ms, silence_ms=router.worker_silence_ms,
            max_index_entries=router.max_index_entries, can_fetch=SETTINGS.transfer.prefix_fetch_ms > 0,
            may_degrade=router.degraded == "local", new_id=new_id,
        )
        self.metrics = WatchedMetrics(
            self.registry, model.served_name, lambda: self.dispatcher.num_running,
            lambda: self.dispatcher.num_waiting, on_end=on_end,
        )
        self.dispatcher = Dispatcher(
            DispatchSettings.of(SETTINGS), registry=self.registry, tokenizer=model.tokenizer,
            vocab_size=model.config.vocab_size, metrics=self.metrics,
            tracing=Tracing(0), new_id=new_id,
        )

    async def start(self, workers: Sequence[WorkerEndpoint]) -> None:
        model, server = model_info(), MemoryServer(self._network, None, self._witness)
        preparer = Preparer(model.tokenizer, model.defaults, lambda: model.limits(self.registry))
        status = Status(
            model, self.registry, settings=SETTINGS, num_running=lambda: self.dispatcher.num_running,
            num_waiting=lambda: self.dispatcher.num_waiting, metrics=self.metrics,
        )
        service = PdRelayService(self.dispatcher, preparer, status, Callers([]), TraceBook(0))
        api_pb2_grpc.add_PdRelayServicer_to_server(service, server)
        server.add_insecure_port(address_of(self.process.name))
        await self.registry.set_workers(workers)
        await server.start()

    def leftovers(self) -> list[str]:
        found = [f"{self.dispatcher.num_running} running requests"] if self.dispatcher.num_running else []
        for link in self.registry.links():
            if link.passengers:
                found.append(f"{len(link.passengers)} journeys at {link.worker_id}")
            if link.load.num_assigned_tokens:
                found.append(f"{link.load.num_assigned_tokens} tokens assigned to {link.worker_id}")
        return found

