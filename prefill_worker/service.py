"""The gRPC face of a prefill worker: checks what arrives, asks the core, translates answers. No decisions here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc.aio import ServicerContext

from kv_transfer.journey import JourneyKey
from kv_transfer.prefix_calls import parse_prefix_holder
from pd_engine.cache.events import CacheLog
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import FailedPrecondition
from pd_engine.priority import check_priority
from pd_engine.service.cache_events import stream_cache_events
from pd_engine.service.loads import stream_loads
from pd_engine.service.requests import (
    Limits,
    check_count,
    parse_choice,
    parse_hex_id,
    parse_id,
    parse_lease_ms,
    parse_num_held_blocks,
    parse_salt,
)
from pd_engine.service.wire import logprobs_message
from prefill_worker.core import PrefillCore
from prefill_worker.job import FirstTokenAnswer, Job, PrefillSpec

Context = ServicerContext[Any, Any]


def parse_prefill(request: pb.PrefillRequest, limits: Limits) -> PrefillSpec:
    """Raises:
    InvalidArgument: a field is outside its range.
    """
    key = JourneyKey.parse(request.journey.journey_id, request.journey.attempt)
    choice = parse_choice(request.token_ids, request.num_prompt_tokens, request.sampling, limits)
    if not request.no_handoff:
        parse_hex_id("lease_id", request.lease_id)
        parse_lease_ms(request.lease_ms)
    return PrefillSpec(
        key=key,
        router_id=parse_id("router_id", request.router_id),
        choice=choice,
        lease_ms=request.lease_ms,
        num_held_blocks=parse_num_held_blocks(
            request.num_held_blocks, num_tokens=len(choice.token_ids), block_size=limits.block_size
        ),
        deadline_ms=request.deadline_ms,
        no_handoff=request.no_handoff,
        bypass_prefix_cache=request.bypass_prefix_cache,
        cache_salt=parse_salt(request.cache_salt),
        priority=check_priority(request.priority),
        prefix_holder=(
            parse_prefix_holder(request.prefix_holder, max_blocks=choice.num_prompt_tokens // limits.block_size)
            if request.HasField("prefix_holder") else None
        ),
    )


class PrefillService(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, core: PrefillCore, limits: Limits) -> None:
        self._core = core
        self._limits = limits

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> AsyncIterator[pb.PrefillReply]:
        job = self._core.submit(parse_prefill(request, self._limits))
        news = asyncio.Event()
        job.listeners.append(news)
        self._core.num_callers += 1
        try:
            async for reply in _replies(job, news):
                yield reply
        finally:
            self._core.num_callers -= 1
            job.listeners.remove(news)
            if not job.listeners:
                self._core.abandon(job)


async def _replies(job: Job, news: asyncio.Event) -> AsyncIterator[pb.PrefillReply]:
    """The source as soon as it is known, then the first token; raises what ended the job without one."""
    source_sent = False
    while True:
        if job.source is not None and not source_sent:
            source_sent = True
            info = job.source
            yield pb.PrefillReply(source=pb.SourceInfo(epoch=info.epoch, address=info.address, token=info.token))
        if job.first is not None:
            yield pb.PrefillReply(first_token=_first_token_message(job.first))
            return
        if job.error is not None:
            raise job.error
        await news.wait()
        news.clear()


def _first_token_message(first: FirstTokenAnswer) -> pb.FirstToken:
    return pb.FirstToken(
        index=first.index,
        token_id=first.token.token_id,
        logprobs=logprobs_message(first.token),
        finish_reason=first.finish_reason,
        stop_reason=first.stop_reason,
        cached_tokens=first.num_cached_tokens,
        times=first.times,
    )


class PrefillWorkerService(worker_pb2_grpc.WorkerServicer):
    """What every worker answers, for this role."""

    def __init__(
        self, core: PrefillCore, cache_log: CacheLog, epoch: str, info: Callable[[], pb.WorkerInfo],
        loads: Callable[[], pb.LoadsReply], details: Callable[[], pb.LoadsReply],
    ) -> None:
        self._core = core
        self._cache_log = cache_log
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
        raise FailedPrecondition("a prefill worker streams no tokens: its first token comes with the reply to Prefill")
        yield  # makes it a generator

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
        return pb.ReleaseReply(epoch=self._epoch)
