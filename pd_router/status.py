"""What the router says of itself, its model and its workers."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from collections.abc import Callable

import psutil

from pd_engine.contracts import api_pb2 as api
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.settings import Settings
from pd_router.link import WorkerLink
from pd_router.link_state import Role
from pd_router.model_info import ModelInfo
from pd_router.registry import Registry
from pd_router.request_metrics import RequestMetrics
from pd_router.worker_metrics import busiest_over_mean

DISTRIBUTION = "pd-relay"
SERVER_TYPE = "pd-relay-router"


class Status:
    def __init__(
        self, model: ModelInfo, registry: Registry, *, settings: Settings, num_running: Callable[[], int],
        num_waiting: Callable[[], int], metrics: RequestMetrics,
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._registry = registry
        self._cluster = settings.cluster.name
        self._settings_json = settings.model_dump_json()
        self._num_running = num_running
        self._num_waiting = num_waiting
        self._begun_s = time.monotonic()
        self._process = psutil.Process()

    def model_info(self) -> api.GetModelInfoResponse:
        """Fingerprint, dtype and the like come from the workers, and are empty before the first has joined."""
        identity = self._registry.identity or pb.WorkerInfo()
        limits = self._model.limits(self._registry)
        return api.GetModelInfoResponse(
            model_path=str(self._model.path),
            served_model_name=self._model.served_name,
            architecture="DeepseekV3ForCausalLM",
            max_context_length=limits.max_context_length,
            vocab_size=limits.vocab_size,
            dtype=identity.dtype,
            num_parameters=identity.num_parameters,
            fingerprint=identity.fingerprint,
            block_size=identity.block_size,
            bytes_per_token=identity.bytes_per_token,
            num_draft_layers=self._model.config.num_nextn_predict_layers,
            eos_token_ids=self._model.tokenizer.eos_token_ids,
        )

    def server_info(self) -> api.GetServerInfoResponse:
        return api.GetServerInfoResponse(
            version=importlib.metadata.version(DISTRIBUTION),
            server_type=SERVER_TYPE,
            uptime_seconds=time.monotonic() - self._begun_s,
            active_requests=self._num_running(),
            workers=[_worker_status(link) for link in self._registry.links()],
            router_rss_bytes=self._process.memory_info().rss,
            router_pid=os.getpid(),
            cluster=self._cluster,
            settings_json=self._settings_json,
        )

    def loads(self) -> api.GetLoadsResponse:
        """Of the workers that report at present."""
        return api.GetLoadsResponse(
            loads=[
                api.WorkerLoad(
                    worker_id=link.worker_id,
                    num_running=link.loads.num_running,
                    num_waiting=link.loads.num_waiting,
                    num_blocks_free=link.loads.num_blocks_free,
                    num_blocks_total=link.loads.num_blocks_total,
                    queued_prefill_tokens=link.loads.queued_prefill_tokens,
                    num_leases=link.loads.num_leases,
                    num_pins=link.loads.num_pins,
                    role=link.role.value,
                    prefill_tokens_per_s=link.loads.prefill_tokens_per_s,
                    itl_ms=link.loads.itl_ms,
                    stages=[api.StageSeconds(stage=one.stage, seconds=one.seconds) for one in link.loads.stages],
                    watched_seconds=link.loads.watched_seconds,
                    fetched_bytes_total=link.loads.fetched_bytes_total,
                    num_quarantined_blocks=link.loads.num_quarantined_blocks,
                )
                for link in self._registry.links()
                if link.loads is not None
            ],
            num_requests_waiting=self._num_waiting(),
            router_stages=[
                api.StageSeconds(stage=stage, seconds=seconds)
                for stage, seconds in self._metrics.own_stages.seconds().items()
            ],
            num_drafted_total=self._metrics.num_drafted,
            num_accepted_total=self._metrics.num_accepted,
            num_handoffs_total=self._metrics.num_handoffs,
            handoff_bytes_total=self._metrics.num_handoff_bytes,
            experts=[
                api.ExpertSkew(role=role.value, max_over_mean=[one or 0.0 for one in skews])
                for role in Role if (skews := busiest_over_mean(self._registry.links(role)))
            ],
        )


def _worker_status(link: WorkerLink) -> api.WorkerStatus:
    info = link.info or pb.WorkerInfo()
    loads = link.loads or pb.LoadsReply()
    return api.WorkerStatus(
        id=link.worker_id,
        role=link.role.value,
        pid=info.pid,
        host=info.host,
        address=link.endpoint.address,
        epoch=info.epoch,
        state=link.state.value,
        num_blocks_total=info.num_blocks_total,
        num_blocks_free=loads.num_blocks_free,
        num_running=loads.num_running,
        num_waiting=loads.num_waiting,
        rss_bytes=loads.rss_bytes,
        weights_bytes=info.weights_bytes,
        arena_bytes=info.arena_bytes,
        ops_backend=info.ops_backend,
        load_seconds=info.load_seconds,
        load_cpu_seconds=info.load_cpu_seconds,
        num_preempted=loads.num_preempted,
        host_cache_bytes=loads.host_cache_bytes,
        num_moves_total=loads.num_moves_total,
        num_recomputed_total=loads.num_recomputed_total,
        memory=_memory(link.load.memory),
        state_ms=round(1e3 * (asyncio.get_running_loop().time() - link.state_since_s)),
    )


def _memory(memory: pb.MemoryAudit | None) -> api.MemoryAudit | None:
    """The same fields: what a worker tells, as the public API tells it."""
    if memory is None:
        return None
    return api.MemoryAudit(**{field.name: getattr(memory, field.name) for field in api.MemoryAudit.DESCRIPTOR.fields})
