"""Workers that speak the internal services with a toy model in place of a real one, and faults to order.

The toy's next token is a hash of all tokens before it, so that a stream which was resumed, retried or mixed up is
told from the right one. A decode stub learns from the source that it was told of when the prompt is done.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import Gone, PdRelayError, ResourceExhausted, Unavailable
from pd_engine.service.client import connect, kv_source_stub
from pd_engine.service.server import bind, build_server
from support.stub_faults import Faults
from support.stub_lease import LEASE_MS, Lease
from support.toy_model import next_token, toy_logprobs, toy_seed


class StubWorker(
    worker_pb2_grpc.WorkerServicer,
    worker_pb2_grpc.PrefillWorkerServicer,
    worker_pb2_grpc.DecodeWorkerServicer,
    worker_pb2_grpc.KvSourceServicer,
):
    """One worker, of either role, in this process.

    Attributes:
        calls: names of the calls that arrived, with journey id and attempt.
        max_seen_attempt: by journey.
        burst: tokens an event.
        cached, cache_sequence: what its prefix cache holds, and the number of its last event; see `tell_cache`.
        cache_readers: the sequence from which each reader of its cache's events began.
        cache_queue: of the last such reader: what it is sent; an error ends it.
        loads: more fields of its load reports.
    """

    def __init__(
        self,
        worker_id: str,
        role: str,
        *,
        secret: str,
        num_blocks: int = 1024,
        block_size: int = 16,
        burst: int = 1,
        **info: Any,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.faults = Faults()
        self.address = ""
        self.epoch = ""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.burst = burst
        self.state = "ready"
        self.calls: list[tuple[str, str, int]] = []
        self.num_renewals = 0
        self.leases: dict[str, Lease] = {}
        self.pins: dict[str, tuple[int, asyncio.Event]] = {}
        self.released: dict[str, int] = {}
        self.requests: list[Any] = []
        self.streams: dict[str, asyncio.Queue[pb.TokensEvent | None]] = {}
        self.arrived: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.cached: list[bytes] = []
        self.cache_sequence = 1
        self.cache_told: list[pb.CacheEventBatch] = []
        self.cache_readers: list[int] = []
        self.cache_queue: asyncio.Queue[pb.CacheEventBatch | PdRelayError] | None = None
        self.loads: dict[str, Any] = {}
        self._secret = secret
        self._info = info
        self._server: grpc.aio.Server | None = None
        self._ending: asyncio.Task[None] | None = None  # of the last life, which gives its port back
        self._port = 0

    async def start(self) -> None:
        """Begins a life; on the same port as the last one."""
        if self._ending is not None:
            await asyncio.shield(self._ending)
        self.epoch = secrets.token_hex(16)
        server = build_server(secret=self._secret)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        worker_pb2_grpc.add_KvSourceServicer_to_server(self, server)
        if self.role == "prefill":
            worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self, server)
        else:
            worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, server)
        self._port = bind(server, "127.0.0.1", self._port)
        self.address = f"127.0.0.1:{self._port}"
        self._server = server
        await server.start()

    async def kill(self) -> None:
        """Ends like a killed process: connections break, everything is forgotten."""
        server, self._server = self._server, None
        for lease in self.leases.values():
            if lease.task is not None and lease.task is not asyncio.current_task():
                lease.task.cancel()
        self.leases.clear()
        self.pins.clear()
        self.streams.clear()
        self.cached, self.cache_sequence, self.cache_told, self.cache_queue = [], 1, [], None
        if server is not None:
            await server.stop(None)

    def assert_no_leaks(self) -> None:
        assert not self.leases, (self.worker_id, self.leases)
        assert not self.pins, (self.worker_id, self.pins)

    @property
    def num_blocks_free(self) -> int:
        return self.num_blocks - sum(lease.num_blocks for lease in self.leases.values())

    def _note(self, call: str, request: Any) -> tuple[str, int]:
        ref = request.journey
        self.calls.append((call, ref.journey_id, ref.attempt))
        self.requests.append(request)
        self.arrived[call].set()
        if ref.attempt <= self.released.get(ref.journey_id, 0):
            raise Gone()
        return ref.journey_id, ref.attempt

    async def _unless_mute(self) -> None:
        if self.faults.mute:
            await asyncio.Event().wait()

    # Worker

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.WorkerInfo:
        await self._unless_mute()
        info: dict[str, Any] = {
            "fingerprint": "ab" * 16,
            "layout_version": 1,
            "bytes_per_token": 5760,
            "dtype": "bf16",
            "max_speculate": 1,
            "max_context_length": 4096,
            "num_parameters": 12_600_000,
            "host": "127.0.0.1",
        }
        return pb.WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            epoch=self.epoch,
            block_size=self.block_size,
            num_blocks_total=self.num_blocks,
            **(info | self._info),
        )

    async def Loads(self, request: pb.LoadsRequest, context: Any) -> AsyncIterator[pb.LoadsReply]:
        while True:
            await self._unless_mute()
            report: dict[str, Any] = {
                "num_blocks_free": self.num_blocks_free,
                "num_blocks_total": self.num_blocks,
                "num_leases": len(self.leases),
                "num_pins": len(self.pins),
            }
            yield pb.LoadsReply(epoch=self.epoch, state=self.state, **(report | self.loads))
            await asyncio.sleep(request.interval_ms / 1000)

    async def Tokens(self, request: pb.TokensRequest, context: Any) -> AsyncIterator[pb.TokensBatch]:
        queue = self.streams[request.router_id] = asyncio.Queue()
        while (event := await queue.get()) is not None:
            events = [event]
            while not queue.empty() and (more := queue.get_nowait()) is not None:
                events.append(more)
            yield pb.TokensBatch(epoch=self.epoch, events=events)

    async def CacheEvents(
        self, request: pb.CacheEventsRequest, context: Any
    ) -> AsyncIterator[pb.CacheEventBatch]:
        """A snapshot, or what came after; then what a test hands to `tell_cache`."""
        self.cache_readers.append(request.from_sequence)
        queue = self.cache_queue = asyncio.Queue()
        if request.from_sequence:
            missed = [batch for batch in self.cache_told if batch.sequence > request.from_sequence]
        else:
            missed = [pb.CacheEventBatch(sequence=self.cache_sequence, snapshot=True, stored=self.cached)]
        for batch in missed:
            queue.put_nowait(batch)
        while True:
            batch = await queue.get()
            if isinstance(batch, PdRelayError):
                raise batch
            batch.epoch = self.epoch
            yield batch

    def tell_cache(self, *, stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), lost: bool = False) -> None:
        """Its cache changes; a message that is lost reaches nobody."""
        self.cached = [block_hash for block_hash in self.cached if block_hash not in removed] + list(stored)
        batch = pb.CacheEventBatch(
            sequence=self.cache_sequence + len(stored) + len(removed), previous_sequence=self.cache_sequence,
            stored=stored, removed=removed,
        )
        self.cache_sequence = batch.sequence
        self.cache_told.append(batch)
        if not lost and self.cache_queue is not None:
            self.cache_queue.put_nowait(batch)

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewReply:
        self.num_renewals += 1
        await self._unless_mute()
        if self.faults.renew_gate is not None:
            await self.faults.renew_gate.wait()
        known = self.leases if self.role == "decode" else self.pins
        states = [
            pb.JourneyState(journey=ref, state="running" if ref.journey_id in known else "gone")
            for ref in request.journeys
        ]
        return pb.RenewReply(epoch=self.epoch, states=states)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        for ref in request.journeys:
            self.calls.append(("Release", ref.journey_id, ref.attempt))
            self.released[ref.journey_id] = max(ref.attempt, self.released.get(ref.journey_id, 0))
            lease = self.leases.get(ref.journey_id)
            if lease is not None and lease.request.journey.attempt <= ref.attempt:
                del self.leases[ref.journey_id]
                if lease.task is not None:
                    lease.task.cancel()
            pin = self.pins.get(ref.journey_id)
            if pin is not None and pin[0] <= ref.attempt:
                del self.pins[ref.journey_id]
        return pb.ReleaseReply(epoch=self.epoch)

    # Prefill

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillReply]:
        journey_id, attempt = self._note("Prefill", request)
        if self.faults.prefill:
            raise self.faults.prefill.pop(0)
        done = asyncio.Event()
        if not request.no_handoff:
            self.pins[journey_id] = (attempt, done)
            source = pb.SourceInfo(epoch=self.epoch, address=self.address, token=journey_id)
            self.faults.spoil_next("source", source)
            yield pb.PrefillReply(source=source)
        if self.faults.prefill_gate is not None:
            await self.faults.prefill_gate.wait()
        done.set()
        if self.faults.no_first_reply:
            self.faults.no_first_reply -= 1
            raise Unavailable("the call breaks, as ordered")
        token_id = next_token(request.token_ids, toy_seed(request.sampling))
        first = pb.FirstToken(index=len(request.token_ids) - request.num_prompt_tokens, token_id=token_id)
        first.cached_tokens = min(3, request.num_prompt_tokens)
        if request.sampling.logprobs >= 0:
            first.logprobs.CopyFrom(toy_logprobs(token_id, request.sampling.logprobs))
        self.faults.spoil_next("first_token", first)
        yield pb.PrefillReply(first_token=first)

    async def Manifest(self, request: pb.ManifestRequest, context: Any) -> AsyncIterator[pb.ManifestPart]:
        if request.source_epoch != self.epoch or request.token not in self.pins:
            raise Gone()
        await self.pins[request.token][1].wait()
        self.pins.pop(request.token, None)
        yield pb.ManifestPart(part=b"closing")

    # Decode

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveReply:
        journey_id, _ = self._note("Reserve", request)
        if self.faults.reserve:
            raise self.faults.reserve.pop(0)
        known = self.leases.pop(journey_id, None)
        if known is not None and known.task is not None:
            known.task.cancel()
        slots = request.num_prompt_tokens + request.sampling.max_tokens + request.sampling.speculate
        num_blocks = -(-slots // self.block_size)
        if num_blocks > self.num_blocks_free:
            raise ResourceExhausted(f"{num_blocks} blocks are needed, {self.num_blocks_free} are free")
        lease = self.leases[journey_id] = Lease(request, secrets.token_hex(16), num_blocks)
        reply = pb.ReserveReply(epoch=self.epoch, lease_id=lease.lease_id, lease_ms=LEASE_MS)
        self.faults.spoil_next("lease", reply)
        return reply

    async def Pull(self, request: pb.PullRequest, context: Any) -> pb.PullReply:
        journey_id, _ = self._note("Pull", request)
        if self.faults.pull:
            raise self.faults.pull.pop(0)
        lease = self.leases.get(journey_id)
        if lease is None or lease.lease_id != request.lease_id:
            raise Gone()
        lease.task = asyncio.create_task(self._decode(lease, request.source))
        return pb.PullReply(epoch=self.epoch)

    async def ComputePrompt(self, request: pb.ComputePromptRequest, context: Any) -> pb.ComputePromptReply:
        journey_id, _ = self._note("ComputePrompt", request)
        if self.faults.compute:
            raise self.faults.compute.pop(0)
        lease = self.leases.get(journey_id)
        if lease is None or lease.lease_id != request.lease_id:
            raise Gone()
        lease.task = asyncio.create_task(self._compute_prompt(lease))
        return pb.ComputePromptReply(epoch=self.epoch)

    async def _compute_prompt(self, lease: Lease) -> None:
        done = pb.LocalPrefillDone(cached_tokens=min(4, lease.request.num_prompt_tokens), block_checksums=[3])
        self._tell(lease, pb.TokensEvent(journey=lease.request.journey, local_prefill=done))
        await self._generate(lease)

    async def _decode(self, lease: Lease, source: pb.SourceInfo) -> None:
        ref = lease.request.journey
        try:
            async with connect(source.address, self._secret) as channel:
                manifest = pb.ManifestRequest(journey=ref, token=source.token, source_epoch=source.epoch)
                async for _ in kv_source_stub(channel).Manifest(manifest):
                    pass
        except grpc.aio.AioRpcError as error:
            failure = pb.Failure(
                code="unavailable", message=f"source: {error.details()}", retryable=True, missing_blocks=[0]
            )
            self._tell(lease, pb.TokensEvent(journey=ref, failure=failure))
            return
        num_bytes = lease.request.num_prompt_tokens * 5760
        handoff = pb.HandoffDone(
            bytes=num_bytes, transport="stub", block_checksums=[1, 2],
            cached_tokens=min(3, lease.request.num_prompt_tokens),
        )
        self._tell(lease, pb.TokensEvent(journey=ref, handoff=handoff))
        await self._generate(lease)

    async def _generate(self, lease: Lease) -> None:
        request = lease.request
        ids = list(request.token_ids)
        index = request.num_emitted_tokens
        ending = set(request.sampling.stop_token_ids)
        reason = ""
        while not reason:
            tokens: list[int] = []
            while not reason and len(tokens) < self.burst and not self._is_ordered(index + len(tokens), tokens):
                tokens.append(next_token(ids, toy_seed(request.sampling)))
                ids.append(tokens[-1])
                if tokens[-1] in ending:
                    reason = "stop"
                elif index + len(tokens) >= request.sampling.max_tokens:
                    reason = "length"
            if not tokens and await self._misbehave(lease, index):
                return
            event = pb.TokensEvent(journey=request.journey, index=index, finish_reason=reason)
            event.token_ids.extend(self._sent(index, tokens))
            if request.sampling.logprobs >= 0:
                event.logprobs.extend(toy_logprobs(token, request.sampling.logprobs) for token in tokens)
            index += len(tokens)
            event.drafted_tokens = index
            event.accepted_tokens = index // 2
            self.faults.spoil_next("event", event)
            self._tell(lease, event)
            await asyncio.sleep(0)
        if self.leases.get(request.journey.journey_id) is lease:
            del self.leases[request.journey.journey_id]

    def _is_ordered(self, index: int, tokens: list[int]) -> bool:
        faults = self.faults
        return index in faults.fail_at or index in (faults.die_at, faults.stall_at)

    def _sent(self, index: int, tokens: list[int]) -> list[int]:
        wrong = self.faults.wrong_token_at
        if wrong is None or not index <= wrong < index + len(tokens):
            return tokens
        self.faults.wrong_token_at = None
        return [token + 1 if index + i == wrong else token for i, token in enumerate(tokens)]

    async def _misbehave(self, lease: Lease, index: int) -> bool:
        """Does what was ordered at this index; whether that is the end of the choice here."""
        faults = self.faults
        if index in faults.fail_at:
            failure = faults.fail_at.pop(index)
            self._tell(lease, pb.TokensEvent(journey=lease.request.journey, failure=failure))
            return True
        if faults.die_at == index:
            faults.die_at = None
            await self.kill()
            return True
        assert faults.stall_at == index
        faults.stall_at = None
        self.arrived["stall"].set()
        await asyncio.Event().wait()
        return True

    def _tell(self, lease: Lease, event: pb.TokensEvent) -> None:
        queue = self.streams.get(lease.request.router_id)
        if queue is not None:
            queue.put_nowait(event)
