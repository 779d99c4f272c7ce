"""The gRPC face of a decode worker: checks what arrives, asks the core, translates answers. No decisions here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc.aio import ServicerContext

from decode_worker.choice_state import ReserveSpec
from decode_worker.core import DecodeCore
from decode_worker.tokens_hub import TokensHub
from kv_transfer.journey import JourneyKey, SourceInfo
from kv_transfer.prefix_calls import parse_prefix_holder
from kv_transfer.source import HandoffSource
from pd_engine.cache.events import CacheLog
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import Gone
from pd_engine.priority import check_priority
from pd_engine.service.cache_events import stream_cache_events
from pd_engine.service.loads import stream_loads
from pd_engine.service.requests import (
    Limits,
    check_count,
    parse_address,
    parse_block_hashes,
    parse_choice,
    parse_hex_id,
    parse_id,
    parse_salt,
)

Context = ServicerContext[Any, Any]


def parse_reserve(request: pb.ReserveRequest, limits: Limits) -> ReserveSpec:
    """Raises:
    InvalidArgument: a field is outside its range.
    """
    key = JourneyKey.parse(request.journey.journey_id, request.journey.attempt)
    choice = parse_choice(request.token_ids, request.num_prompt_tokens, request.sampling, limits)
    parse_block_hashes(
        request.block_hashes, num_prompt_tokens=choice.num_prompt_tokens, block_size=limits.block_size
    )
    return ReserveSpec(
        key=key,
        router_id=parse_id("router_id", request.router_id),
        choice=choice,
        deadline_ms=request.deadline_ms,
        report_block_checksums=request.report_block_checksums,
        bypass_prefix_cache=request.bypass_prefix_cache,
        cache_salt=parse_salt(request.cache_salt),
        priority=check_priority(request.priority),
    )


def parse_pull(request: pb.PullRequest) -> tuple[JourneyKey, str, SourceInfo]:
    """(journey, lease id, source).

    Raises:
        InvalidArgument: a field is outside its range.
    """
    return (
        JourneyKey.parse(request.journey.journey_id, request.journey.attempt),
        parse_hex_id("lease_id", request.lease_id),
        SourceInfo(
            address=parse_address("source.address", request.source.address),
            epoch=parse_hex_id("source.epoch", request.source.epoch),
            token=parse_hex_id("source.token", request.source.token),
        ),
    )


class DecodeService(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, core: DecodeCore, limits: Limits, epoch: str) -> None:
        self._core = core
        self._limits = limits
        self._epoch = epoch

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveReply:
        lease = self._core.reserve(parse_reserve(request, self._limits))
        return pb.ReserveReply(
            epoch=self._epoch, lease_id=lease.lease_id, lease_ms=lease.lease_ms, num_held_blocks=lease.num_held_blocks
        )

    async def Pull(self, request: pb.PullRequest, context: Context) -> pb.PullReply:
        self._core.pull(*parse_pull(request))
        return pb.PullReply(epoch=self._epoch)

    async def ComputePrompt(self, request: pb.ComputePromptRequest, context: Context) -> pb.ComputePromptReply:
        key = JourneyKey.parse(request.journey.journey_id, request.journey.attempt)
        holder = None
        if request.HasField("prefix_holder"):
            max_blocks = self._limits.max_context_length // self._limits.block_size
            holder = parse_prefix_holder(request.prefix_holder, max_blocks=max_blocks)
        self._core.compute_prompt(key, parse_hex_id("lease_id", request.lease_id), holder)
        return pb.ComputePromptReply(epoch=self._epoch)


class DecodeWorkerService(worker_pb2_grpc.WorkerServicer):
    """What every worker answers, for this role."""

    def __init__(
        self, core: DecodeCore, source: HandoffSource, hub: TokensHub, cache_log: CacheLog, epoch: str,
        info: Callable[[], pb.WorkerInfo], loads: Callable[[], pb.LoadsReply], details: Callable[[], pb.LoadsReply],
    ) -> None:
        self._core = core
        self._source = source
        self._cache_log = cache_log
        self._hub = hub
        self._epoch = epoch
        self._info = info
        self._loads = loads
        self._details = details

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.WorkerInfo:
        return self._info()

    async def Loads(self, request: pb.LoadsRequest, context: Context) -> AsyncIterator[pb.LoadsReply]:
        async for reply in stream_loads(request, self._loads, self._details):
            yield reply

    async def Tokens(self, request: pb.TokensRequest, context: Context) -> AsyncIterator[pb.TokensBatch]:
        """An empty message at once (the stream stands), then one a step; ends "gone" when the router opens another."""
        router_id = parse_id("router_id", request.router_id)
        subscription = self._hub.subscribe(router_id)
        try:
            yield pb.TokensBatch(epoch=self._epoch)
            while True:
                await subscription.wait()
                if subscription.replaced:
                    raise Gone()
                yield pb.TokensBatch(epoch=self._epoch, events=subscription.take())
        finally:
            self._hub.unsubscribe(router_id, subscription)
            self._core.router_left(router_id)

    async def CacheEvents(
        self, request: pb.CacheEventsRequest, context: Context
    ) -> AsyncIterator[pb.CacheEventBatch]:
        async for batch in stream_cache_events(request, self._cache_log, self._epoch):
            yield batch

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:
        check_count("journeys", len(request.journeys))
        keys = [JourneyKey.parse(ref.journey_id, ref.attempt) for ref in request.journeys]
        states = [
            pb.JourneyState(journey=ref, state=self._core.renew(key))
            for ref, key in zip(request.journeys, keys, strict=True)
        ]
        return pb.RenewReply(epoch=self._epoch, states=states)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        check_count("journeys", len(request.journeys))
        for key in [JourneyKey.parse(ref.journey_id, ref.attempt) for ref in request.journeys]:
            self._core.release(key.journey_id, key.attempt)
            self._source.release(key.journey_id, key.attempt)
        return pb.ReleaseReply(epoch=self._epoch)
