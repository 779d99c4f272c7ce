"""Plays the router for journey tests: one journey at a time or many, every token kept once by its index."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import ErrorCode
from pd_engine.sampling.params import SamplingParams
from pd_engine.service import client

CALL_TIMEOUT_S = 30.0


def new_journey() -> str:
    return secrets.token_hex(16)


def sampling_message(params: SamplingParams, eos_token_ids: Sequence[int], speculate: int) -> pb.Sampling:
    """As the router resolves it: eos among the stop tokens unless it is ignored."""
    return pb.Sampling(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, seed=params.seed,
        max_tokens=params.max_tokens, stop_token_ids=sorted(params.ending_ids(eos_token_ids)),
        logprobs=-1 if params.logprobs is None else params.logprobs, speculate=speculate, min_p=params.min_p,
        repetition_penalty=params.repetition_penalty, presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty, logit_bias=dict(params.logit_bias), min_tokens=params.min_tokens,
    )


@dataclass
class Copy:
    """What the router has of one journey, from its attempt `attempt` on."""

    attempt: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=dict)
    finish_reason: str = ""
    stop_reason: str = ""
    failure: pb.Failure | None = None
    handoff: pb.HandoffDone | None = None
    local_prefill: pb.LocalPrefillDone | None = None
    accepted: int = 0
    drafted: int = 0
    cached_tokens: int | None = None  # as the worker that computed the prompt said
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_ids(self) -> list[int]:
        assert sorted(self.tokens) == list(range(min(self.tokens, default=0), max(self.tokens, default=-1) + 1))
        return [self.tokens[index] for index in sorted(self.tokens)]

    def has_ended(self) -> bool:
        return bool(self.finish_reason) or self.failure is not None

    def add(self, index: int, token_ids: Sequence[int], logprobs: Sequence[pb.Logprobs]) -> None:
        for offset, token_id in enumerate(token_ids):
            assert self.tokens.setdefault(index + offset, token_id) == token_id, f"index {index + offset} has changed"
        for offset, item in enumerate(logprobs):
            value = (item.logprob, tuple(zip(item.top_token_ids, item.top_logprobs, strict=True)))
            assert self.logprobs.setdefault(index + offset, value) == value

    def end(self, finish_reason: str, stop_reason: str) -> None:
        if finish_reason:
            assert self.finish_reason in ("", finish_reason)
            self.finish_reason, self.stop_reason = finish_reason, stop_reason


class Player:
    """One router's connections to one prefill and one decode worker."""

    def __init__(self, prefill_address: str, decode_address: str, secret: str) -> None:
        self.prefill_address, self.decode_address = prefill_address, decode_address
        self.router_id = f"router-{secrets.token_hex(4)}"
        patience_ms = round(CALL_TIMEOUT_S * 1000)  # as a router has with busy workers
        self.prefill_channel = client.connect(prefill_address, secret, keepalive_timeout_ms=patience_ms)
        self.decode_channel = client.connect(decode_address, secret, keepalive_timeout_ms=patience_ms)
        self.prefill = client.prefill_stub(self.prefill_channel)
        self.prefill_worker = client.worker_stub(self.prefill_channel)
        self.decode = client.decode_stub(self.decode_channel)
        self.decode_worker = client.worker_stub(self.decode_channel)
        self.copies: dict[str, Copy] = {}
        self._reader: asyncio.Task[None] | None = None
        self._standing = asyncio.Event()

    async def open(self) -> None:
        """Returns when the decode worker's token stream stands."""
        self._standing.clear()
        self._reader = asyncio.create_task(self._read())
        await asyncio.wait_for(self._standing.wait(), CALL_TIMEOUT_S)

    async def cut_stream(self) -> None:
        """Ends the token stream only, as a lost connection would."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def close(self) -> None:
        await self.cut_stream()
        await self.prefill_channel.close()
        await self.decode_channel.close()

    async def _read(self) -> None:
        async for batch in self.decode_worker.Tokens(pb.TokensRequest(router_id=self.router_id)):
            self._standing.set()
            for event in batch.events:
                copy = self.copies.setdefault(event.journey.journey_id, Copy())
                if event.journey.attempt < copy.attempt:
                    continue
                copy.add(event.index, event.token_ids, event.logprobs)
                copy.accepted, copy.drafted = event.accepted_tokens, event.drafted_tokens
                if event.HasField("failure") and not copy.finish_reason:  # an ended choice has no use for its handoff
                    copy.failure = event.failure
                if event.HasField("handoff"):
                    copy.handoff = event.handoff
                if event.HasField("local_prefill"):
                    copy.local_prefill = event.local_prefill
                    copy.cached_tokens = event.local_prefill.cached_tokens
                copy.end(event.finish_reason, event.stop_reason)
                copy.changed.set()

    def copy(self, journey_id: str) -> Copy:
        return self.copies.setdefault(journey_id, Copy())

    async def until(self, journey_id: str, reached: Callable[[Copy], bool]) -> Copy:
        """The journey's copy, once it is so."""
        copy = self.copy(journey_id)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while not reached(copy):
                copy.changed.clear()
                await copy.changed.wait()
        return copy

    def reserve_request(
        self, journey_id: str, token_ids: Sequence[int], sampling: pb.Sampling, *, num_prompt_tokens: int | None = None,
        attempt: int = 1, checksums: bool = False, deadline_ms: int = 0, cached: bool = False, salt: str = "",
    ) -> pb.ReserveRequest:
        """`cached`: whether workers may take blocks from their prefix caches."""
        prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        return pb.ReserveRequest(
            journey=pb.JourneyRef(journey_id=journey_id, attempt=attempt), router_id=self.router_id,
            num_prompt_tokens=prompt, token_ids=token_ids, num_emitted_tokens=len(token_ids) - prompt,
            sampling=sampling, report_block_checksums=checksums, deadline_ms=deadline_ms,
            bypass_prefix_cache=not cached, cache_salt=salt,
        )

    def prefill_request(
        self, reserve: pb.ReserveRequest, lease: pb.ReserveReply | None, *, no_handoff: bool = False,
        holder: pb.PrefixHolder | None = None,
    ) -> pb.PrefillRequest:
        """`holder`: who is said to have the beginning cached."""
        lease = lease or pb.ReserveReply()
        return pb.PrefillRequest(
            journey=reserve.journey, router_id=reserve.router_id, token_ids=reserve.token_ids,
            num_prompt_tokens=reserve.num_prompt_tokens, sampling=reserve.sampling, lease_id=lease.lease_id,
            lease_ms=lease.lease_ms, num_held_blocks=lease.num_held_blocks, deadline_ms=reserve.deadline_ms,
            no_handoff=no_handoff, bypass_prefix_cache=reserve.bypass_prefix_cache, cache_salt=reserve.cache_salt,
            prefix_holder=holder,
        )

    async def prefill_replies(self, request: pb.PrefillRequest) -> AsyncIterator[pb.PrefillReply]:
        async for reply in self.prefill.Prefill(request, timeout=CALL_TIMEOUT_S):
            yield reply

    async def pull(self, reserve: pb.ReserveRequest, lease: pb.ReserveReply, source: pb.SourceInfo) -> None:
        request = pb.PullRequest(journey=reserve.journey, lease_id=lease.lease_id, source=source)
        await self.decode.Pull(request, timeout=CALL_TIMEOUT_S)

    async def compute_prompt(
        self, reserve: pb.ReserveRequest, lease: pb.ReserveReply, holder: pb.PrefixHolder | None = None
    ) -> None:
        request = pb.ComputePromptRequest(journey=reserve.journey, lease_id=lease.lease_id, prefix_holder=holder)
        await self.decode.ComputePrompt(request, timeout=CALL_TIMEOUT_S)

    async def release(self, journey_id: str, attempt: int = 1) -> None:
        request = pb.ReleaseRequest(journeys=[pb.JourneyRef(journey_id=journey_id, attempt=attempt)], reason="test")
        for worker in (self.prefill_worker, self.decode_worker):
            with contextlib.suppress(grpc.aio.AioRpcError):  # one of them may have been killed
                await worker.Release(request, timeout=CALL_TIMEOUT_S)

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        """As a patient router: tries again when the worker has no room."""
        while True:
            try:
                return await self.decode.Reserve(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                typed = client.typed_error(error)
                if typed.code is not ErrorCode.RESOURCE_EXHAUSTED:
                    raise
                assert typed.retry_after_ms is not None
                await asyncio.sleep(typed.retry_after_ms / 1000)

    async def run(
        self, token_ids: Sequence[int], sampling: pb.Sampling, *, num_prompt_tokens: int | None = None,
        lose_first_reply: bool = False, journey_id: str | None = None, cached: bool = False, salt: str = "",
        holder: pb.PrefixHolder | None = None, local: bool = False,
    ) -> Copy:
        """A whole journey, as an undisturbed router would run it; released at its end.

        Args:
            local: the decode worker computes the prompt.
        """
        journey_id = journey_id or new_journey()
        reserve = self.reserve_request(
            journey_id, token_ids, sampling, num_prompt_tokens=num_prompt_tokens, checksums=True, cached=cached,
            salt=salt,
        )
        lease = await self.reserve(reserve)
        copy = self.copy(journey_id)
        if local:
            await self.compute_prompt(reserve, lease, holder)
        replies = self.prefill_replies(self.prefill_request(reserve, lease, holder=holder))
        async for reply in replies if not local else _nothing():
            if reply.HasField("source"):
                await self.pull(reserve, lease, reply.source)
            elif not lose_first_reply:
                first = reply.first_token
                copy.cached_tokens = first.cached_tokens
                copy.add(first.index, [first.token_id], [first.logprobs] if first.HasField("logprobs") else [])
                copy.end(first.finish_reason, first.stop_reason)
                copy.changed.set()
        await self.until(journey_id, Copy.has_ended)
        await self.release(journey_id)
        return copy

    async def loads(self) -> tuple[pb.LoadsReply, pb.LoadsReply]:
        """(prefill worker's, decode worker's), now."""
        replies = []
        for worker in (self.prefill_worker, self.decode_worker):
            call = worker.Loads(pb.LoadsRequest(), timeout=CALL_TIMEOUT_S)
            async for reply in call:
                replies.append(reply)
                call.cancel()
                break
        return replies[0], replies[1]

    async def until_idle(self, *, decode: bool = True) -> None:
        """Waits, for a bounded time, until the workers are back at their baseline; fails with what is left."""
        last: list[pb.LoadsReply] = []
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                for worker in [self.prefill_worker, *([self.decode_worker] if decode else [])]:
                    call = worker.Loads(pb.LoadsRequest(interval_ms=20))
                    async for reply in call:
                        last = [reply]
                        if is_idle(reply):
                            call.cancel()
                            break
        except TimeoutError:
            raise AssertionError(f"something is left: {last}") from None


async def _nothing() -> AsyncIterator[pb.PrefillReply]:
    return
    yield  # makes it a generator


def is_idle(load: pb.LoadsReply) -> bool:
    """Nothing runs, waits, is leased, pinned, quarantined or streamed, and every block is free."""
    left = (
        load.num_running, load.num_waiting, load.queued_prefill_tokens, load.num_leases, load.num_pins,
        load.num_streams, load.num_quarantined_blocks, load.num_preempted, load.host_cache_bytes,
    )
    return not any(left) and load.num_blocks_free == load.num_blocks_total
