"""One decode worker: engine, compute thread, both sides of handoffs, token streams and gRPC server, put together.
Knows no Ray."""

from __future__ import annotations

import asyncio
import logging

import torch

from decode_worker.blocks import ChoiceBlocks
from decode_worker.choice_state import ChoiceRecord
from decode_worker.core import DecodeCore
from decode_worker.itl_budget import ItlBudget
from decode_worker.room import RoomKeeper
from decode_worker.runner import DecodeRunner, StepReport
from decode_worker.service import DecodeService, DecodeWorkerService
from decode_worker.tokens_hub import TokensHub
from kv_transfer.destination import HandoffDestination
from kv_transfer.holds import PrefixHolder
from kv_transfer.journey import JourneyKey
from kv_transfer.lease import PullResult
from kv_transfer.prefix_fetch import PrefixFetcher
from kv_transfer.source import HandoffSource
from kv_transfer.surroundings import ProcessSurroundings, Surroundings
from pd_engine.cache.events import CacheLog
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.engine import MIB, Engine
from pd_engine.errors import PdRelayError, Unavailable
from pd_engine.service.compute import Compute
from pd_engine.service.endpoint import Endpoint
from pd_engine.service.identity import (
    StartCost,
    WorkerAddress,
    limits_of,
    max_speculate,
    prefix_cache,
    worker_info,
)
from pd_engine.service.memory import audit_text
from pd_engine.settings import Settings
from pd_engine.stages import StageTotals, watched
from pd_engine.steps.speculation import SpeculationPolicy
from pd_kernels.block_checksum.ranges import range_checksums

SERVICES = ("pdrelay.internal.v1.Worker", "pdrelay.internal.v1.DecodeWorker", "pdrelay.internal.v1.KvSource")

log = logging.getLogger(__name__)


class DecodeWorker:
    """Made anywhere, started and used in one event loop.

    Args:
        worker_id: unique in the cluster.
        host: to listen on, and what peers are told.
        secret: of the cluster.
        port: 0: any free one.
        surroundings: None: those of a process of its own.
    """

    def __init__(
        self, settings: Settings, *, worker_id: str, host: str, secret: str, port: int = 0,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._around = surroundings or ProcessSurroundings(settings, secret=secret, host=host)
        self._endpoint = Endpoint(
            host=host, port=port, epoch=self._around.new_id(), make_server=self._around.server, service_names=SERVICES,
            open_lifeline=self._around.lifeline,
        )
        self._compute = self._around.compute(f"decode-{worker_id}", self._build_runner, self._on_crash)
        self._crashed = asyncio.Event()
        self._drained = asyncio.Event()
        self._unhealthy: asyncio.Future[None] | None = None
        self._hub = TokensHub()
        self._cache_log = CacheLog()
        self._engine: Engine | None = None
        self._destination: HandoffDestination | None = None
        self._source: HandoffSource | None = None
        self._holder: PrefixHolder | None = None
        self._fetcher: PrefixFetcher[ChoiceRecord] | None = None
        self._core: DecodeCore | None = None
        self._transports: list[str] = []
        self._start_cost = StartCost(seconds=0.0, cpu_seconds=0.0)
        self._stages = StageTotals()

    async def start(self) -> WorkerAddress:
        """Loads the model, listens, and returns when calls are answered.

        Raises:
            PdRelayError: the model or the settings are wrong, or the port is taken.
        """
        address = self._endpoint.bind()
        runner = await self._compute.start()
        engine = self._engine = runner.engine
        cache = prefix_cache(engine, self._cache_log, is_on=self._settings.engine.prefix_cache)
        blocks = ChoiceBlocks(engine.pool, cache, with_mtp=engine.has_mtp)
        core = self._core = DecodeCore(
            blocks=blocks, room=self._room_keeper(engine, blocks, runner),
            block_size=engine.layout.block_size, projected_tokens=self._settings.decode.projected_tokens,
            silence_s=self._settings.transfer.lease_ms / 1000, hub=self._hub, runner=runner,
            post=self._compute.post, report=self._compute.report, clock=self._around.clock,
        )
        fetcher: PrefixFetcher[ChoiceRecord] = PrefixFetcher(
            blocks, epoch=self._endpoint.epoch, fetch_ms=self._settings.transfer.prefix_fetch_ms,
            block_size=engine.layout.block_size, on_end=core.local.fetched, new_id=self._around.new_id,
        )
        self._fetcher = fetcher
        fetcher.destination = self._destination = self._make_destination(engine, core, fetcher)
        core.connect(self._destination, fetcher)
        await self._destination.start()
        source = self._source = HandoffSource(
            arena=engine.arena, fingerprint=engine.fingerprint, worker_id=self._worker_id, epoch=self._endpoint.epoch,
            address=address, settings=self._settings.transfer,
            transports=self._around.source_transports(), checksums=range_checksums, clock=self._around.clock,
            new_id=self._around.new_id, publisher=self._around.publisher, on_crash=self._on_crash,
        )
        await source.start()
        self._holder = PrefixHolder(
            source, engine.pool, cache, with_mtp=engine.has_mtp, settings=self._settings.transfer,
            has_room=lambda: not core.room.num_preempted,
        )
        self._add_services(core, source, self._holder)
        self._start_cost = self._around.start_cost()
        await self._endpoint.serve(self._tick, self._on_crash)
        log.info(
            "decode worker %s answers on %s, %.1f s after its process began, of which it computed for %.1f s",
            self._worker_id, address, self._start_cost.seconds, self._start_cost.cpu_seconds,
        )
        return WorkerAddress(address=address, epoch=self._endpoint.epoch)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Takes nothing new, and returns when every choice has ended, its router has been told and nobody reads
        blocks here; False if that takes longer."""
        assert self._core is not None and self._holder is not None, "not started"
        self._core.draining = self._holder.draining = True
        await self._endpoint.set_healthy(False)
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ends everything at once. Safe to call twice, and after a start that failed."""
        if self._core is not None:
            self._core.draining = True
            self._core.fail_all(Unavailable("this decode worker has stopped"))
        if self._holder is not None:
            self._holder.draining = True
        if self._source is not None:
            await self._source.stop()
        if self._fetcher is not None:
            await self._fetcher.close()
        if self._destination is not None:
            await self._destination.stop()
        await self._endpoint.stop()
        await self._compute.stop()
        if self._engine is not None:
            if (holdings := self._engine.pool.holdings()) and not self._crashed.is_set():
                log.error("blocks are still held at the end: %s", holdings)
            log.info("memory at the end: %s", audit_text(self._around.memory(self._engine, host_cache_bytes=0)))
            self._engine.arena.close()

    async def wait_crashed(self) -> None:
        """Returns if the worker can no longer serve: it should be stopped, and its process ended."""
        await self._crashed.wait()

    def info(self) -> pb.WorkerInfo:
        assert self._engine is not None and self._destination is not None, "not started"
        info = worker_info(
            self._engine, worker_id=self._worker_id, role="decode", epoch=self._endpoint.epoch,
            transports=self._transports, start_cost=self._start_cost,
            lifeline_port=self._endpoint.lifeline_port,
        )
        info.computes_prompts = True
        return info

    def loads(self) -> pb.LoadsReply:
        core, engine, destination, source = self._core, self._engine, self._destination, self._source
        assert core is not None and engine is not None and destination is not None and source is not None, "not started"
        reply = pb.LoadsReply(
            epoch=self._endpoint.epoch,
            state="draining" if core.draining else "ready",
            num_running=core.steps.num_running,
            num_waiting=core.num_waiting,
            num_blocks_free=engine.pool.num_free,
            num_blocks_total=engine.pool.num_blocks,
            num_leases=destination.num_leases,
            num_pins=source.num_pins,
            rss_bytes=self._around.rss_bytes(),
            itl_ms=core.steps.itl_ms,
            queued_prefill_tokens=core.local.num_queued_tokens,
            prefill_tokens_per_s=core.local.tokens_per_s.value,
            num_streams=self._hub.num_open,
            num_quarantined_blocks=engine.pool.num_quarantined,
            pull_bytes_per_s=destination.bytes_per_s,
            num_preempted=core.room.num_preempted,
            host_cache_bytes=core.room.host_bytes,
            num_moves_total=core.room.num_moves,
            num_recomputed_total=core.room.num_recomputed,
        )
        reply.MergeFrom(destination.totals.loads())
        reply.MergeFrom(self._stages.loads())
        return reply

    def details(self) -> pb.LoadsReply:
        """What is too much for every report."""
        assert self._engine is not None and self._core is not None, "not started"
        reply = self._stages.details()
        reply.memory.CopyFrom(self._around.memory(self._engine, host_cache_bytes=self._core.room.host_bytes))
        return reply

    def _build_runner(self, thread: Compute[DecodeRunner]) -> DecodeRunner:
        """In the compute thread."""
        torch.set_num_threads(self._settings.engine.threads)
        settings = self._settings.decode
        most = max_speculate(settings.speculate)
        engine = self._around.load_engine(
            most, also_needed={"sequences that wait (decode.host_cache_mib)": settings.host_cache_mib * MIB}
        )
        policy = SpeculationPolicy(most) if settings.adaptive_speculation and engine.has_mtp else None
        return DecodeRunner(
            engine, settings.max_batch, lambda report: thread.report(self._on_step, report), policy,
            steps=watched(self._around.steps, self._stages, self._settings.engine.watch_every),
            clock=self._around.clock,
            budget=ItlBudget(settings.itl_budget_ms / 1000, self._settings.engine.chunk_tokens),
        )

    def _room_keeper(self, engine: Engine, blocks: ChoiceBlocks, runner: DecodeRunner) -> RoomKeeper:
        settings = self._settings.decode
        return RoomKeeper(
            pool=engine.pool, blocks=blocks, layout=engine.layout,
            num_host_blocks=settings.host_cache_mib * MIB // engine.layout.block_bytes, max_batch=settings.max_batch,
            runner=runner, post=self._compute.post,
        )

    def _make_destination(
        self, engine: Engine, core: DecodeCore, fetcher: PrefixFetcher[ChoiceRecord]
    ) -> HandoffDestination:
        def on_complete(key: JourneyKey, result: PullResult) -> None:
            (fetcher if fetcher.owns(key) else core).on_pulled(key, result)

        def on_failed(key: JourneyKey, error: PdRelayError, missing_blocks: tuple[int, ...]) -> None:
            (fetcher if fetcher.owns(key) else core).on_pull_failed(key, error, missing_blocks)

        transports = self._around.pull_transports(engine.arena)
        self._transports = [transport.name for transport in transports]
        return HandoffDestination(
            arena=engine.arena, pool=engine.pool, fingerprint=engine.fingerprint, worker_id=self._worker_id,
            epoch=self._endpoint.epoch, settings=self._settings.transfer, transports=transports,
            checksums=range_checksums, clock=self._around.clock, open_channel=self._around.open_channel,
            on_complete=on_complete, on_failed=on_failed, on_expired=core.on_lease_expired, on_crash=self._on_crash,
            new_id=self._around.new_id,
        )

    def _add_services(self, core: DecodeCore, source: HandoffSource, holder: PrefixHolder) -> None:
        assert self._engine is not None
        server, epoch = self._endpoint.server, self._endpoint.epoch
        worker_pb2_grpc.add_WorkerServicer_to_server(
            DecodeWorkerService(
                core, source, self._hub, self._cache_log, epoch, self.info, self.loads, self.details
            ),
            server,
        )
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(
            DecodeService(core, limits_of(self._engine), epoch), server
        )
        worker_pb2_grpc.add_KvSourceServicer_to_server(source.servicer(holder), server)

    def _on_step(self, report: StepReport) -> None:
        assert self._core is not None
        self._core.steps.on_step(report)

    def _tick(self) -> None:
        assert self._core is not None and self._source is not None
        self._core.tick(self._around.clock())
        if self._core.draining and self._core.is_idle and not self._source.num_pins and self._hub.num_open == 0:
            self._drained.set()

    def _on_crash(self, error: Exception) -> None:
        """The compute thread or the books are broken: every router is told, and the process should end."""
        self._crashed.set()
        self._unhealthy = asyncio.ensure_future(self._endpoint.set_healthy(False))
        if self._holder is not None:
            self._holder.draining = True
        if self._core is not None:
            self._core.draining = True
            self._core.fail_all(Unavailable(f"this decode worker has crashed ({type(error).__name__})"))
