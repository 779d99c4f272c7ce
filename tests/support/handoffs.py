"""Sources and destinations of handoffs for tests: real arenas with random bytes, real gRPC servers, no model."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import numpy as np

from kv_transfer.destination import HandoffDestination
from kv_transfer.holds import PrefixHolder
from kv_transfer.journey import JourneyKey, PrefixSource, SourceInfo
from kv_transfer.lease import PullResult
from kv_transfer.manifest import Closing, HiddenState
from kv_transfer.prefix_calls import HeldPrefix, WantedPrefix
from kv_transfer.source import HandoffSource, SourceEnd
from kv_transfer.transport import PullTransport, SourceTransport
from kv_transfer.transports import pull_transports, source_transports
from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.cache.prefix import PrefixCache
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import PdRelayError
from pd_engine.hashing import block_hashes
from pd_engine.service.client import connect
from pd_engine.service.server import bind, build_server
from pd_engine.settings import TransferSettings
from pd_kernels.block_checksum.ranges import range_checksums

SECRET = "a-secret-of-tests-only"
FINGERPRINT = "0123456789abcdef"
LAYOUT = CacheLayout(
    block_size=16,
    components=tuple(
        Component(name=name, kind=ComponentKind.PAGED, width=96, dtype="bf16", first_position=first)
        for name, first in (("layers.0", 0), ("layers.1", 0), ("mtp.0", 1))
    ),
)


def new_key(attempt: int = 1) -> JourneyKey:
    return JourneyKey(secrets.token_hex(16), attempt)


def fill_random(arena: Arena, seed: int) -> None:
    """Every byte of every piece."""
    random = np.random.default_rng(seed)
    for component in range(len(arena.layout.components)):
        for block in range(arena.num_blocks):
            piece = arena.piece(component, block)
            piece[:] = random.bytes(len(piece))


def closing_for(num_tokens: int) -> Closing:
    return Closing(
        first_token_id=7, num_prompt_tokens=num_tokens, num_cached_tokens=0,
        hidden=HiddenState(data=bytes(range(64)) * 2, dtype="bf16", width=64),
    )


class SourceSide:
    """A worker that is the source of handoffs: arena, pool, gRPC server."""

    def __init__(
        self, *, layout: CacheLayout = LAYOUT, num_blocks: int = 64, settings: TransferSettings | None = None,
        transports: Sequence[SourceTransport] | None = None, seed: int = 1, fingerprint: str = FINGERPRINT,
        worker_id: str = "prefill-0", port: int = 0,
    ) -> None:
        settings = settings or TransferSettings()
        self.layout = layout
        self.arena = Arena(layout, num_blocks)
        self.pool = BlockPool(num_blocks, on_reuse=self.arena.renew)
        fill_random(self.arena, seed)
        self.epoch = secrets.token_hex(16)
        self.ended: list[tuple[JourneyKey, SourceEnd]] = []
        self.blocks: dict[JourneyKey, list[int]] = {}
        if transports is None:
            transports = source_transports(settings, secret=SECRET, host="127.0.0.1")
        self.source = HandoffSource(
            arena=self.arena, fingerprint=fingerprint, worker_id=worker_id, epoch=self.epoch, address="",
            settings=settings, transports=transports, checksums=range_checksums, clock=time.monotonic,
        )
        self.cache = PrefixCache(self.pool, fingerprint=fingerprint, block_size=layout.block_size)
        self.holder = PrefixHolder(self.source, self.pool, self.cache, with_mtp=True, settings=settings)
        self.server = build_server(secret=SECRET)
        self._port = port

    async def start(self) -> None:
        worker_pb2_grpc.add_KvSourceServicer_to_server(self.source.servicer(self.holder), self.server)
        worker_pb2_grpc.add_WorkerServicer_to_server(_Releases(self.source), self.server)
        self.source.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', self._port)}"
        await self.source.start()
        await self.server.start()

    async def stop(self) -> None:
        await self.source.stop()
        await self.server.stop(0)
        self.arena.close()

    def begin(
        self, key: JourneyKey, num_tokens: int, *, num_held_blocks: int = 0, lease_ms: int = 10_000
    ) -> SourceInfo:
        """Allocates blocks that the handoff owns, and starts it."""
        self.blocks[key] = self.pool.allocate(self.layout.num_blocks_for(num_tokens), key.owner)
        return self.source.begin(
            key, block_ids=self.blocks[key], num_tokens=num_tokens, num_held_blocks=num_held_blocks,
            lease_ms=lease_ms, on_end=self._on_end,
        )

    def publish_all(self, key: JourneyKey, num_tokens: int) -> None:
        for component in range(len(self.layout.components)):
            self.source.publish(key, component, num_tokens)
        self.source.finish(key, closing_for(num_tokens))

    def contents(self, key: JourneyKey, num_tokens: int) -> list[bytes]:
        """Component by component, the bytes of the slots of the prompt."""
        return slots_of(self.arena, self.blocks[key], num_tokens)

    def keep(self, token_ids: Sequence[int], *, num_final_mtp: int | None = None, salt: str = "") -> list[int]:
        """As after a request with these tokens: its full blocks are cached. Their ids.

        Args:
            num_final_mtp: leading positions with MTP slots; None: all.
        """
        num_tokens, name = len(token_ids), f"request-{secrets.token_hex(4)}"
        chain = self.cache.chain(token_ids, num_prompt_tokens=num_tokens, salt=salt)
        blocks = self.pool.allocate(self.layout.num_blocks_for(num_tokens), name)
        self.cache.begin(chain, blocks)
        with_mtp = num_tokens if num_final_mtp is None else num_final_mtp
        self.cache.store(chain, blocks, num_final=num_tokens, num_final_mtp=with_mtp)
        self.pool.release(blocks, name)
        return blocks[: chain.num_blocks]

    def _on_end(self, key: JourneyKey, reason: SourceEnd) -> None:
        self.ended.append((key, reason))
        self.pool.release(self.blocks[key], key.owner)


class _Releases(worker_pb2_grpc.WorkerServicer):
    """What a fetcher of prefixes calls beside the source's service."""

    def __init__(self, source: HandoffSource) -> None:
        self._source = source

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseReply:
        for ref in request.journeys:
            self._source.release(ref.journey_id, ref.attempt)
        return pb.ReleaseReply()


class DestinationSide:
    """A worker that is the destination of handoffs."""

    def __init__(
        self, *, layout: CacheLayout = LAYOUT, num_blocks: int = 64, settings: TransferSettings | None = None,
        make_transports: Callable[[Arena], Sequence[PullTransport]] | None = None, fingerprint: str = FINGERPRINT,
        worker_id: str = "decode-0",
    ) -> None:
        settings = settings or TransferSettings()
        self.channels: dict[str, grpc.aio.Channel] = {}  # the last one to each address
        self.layout = layout
        self.arena = Arena(layout, num_blocks)
        self.pool = BlockPool(num_blocks, on_reuse=self.arena.renew)
        fill_random(self.arena, 2)
        self.completed: dict[JourneyKey, PullResult] = {}
        self.failed: dict[JourneyKey, tuple[PdRelayError, tuple[int, ...]]] = {}
        self.expired: list[JourneyKey] = []
        self._changed = asyncio.Condition()
        self._ends: dict[JourneyKey, asyncio.Event] = {}
        transports = (
            pull_transports(settings, self.arena, secret=SECRET) if make_transports is None
            else make_transports(self.arena)
        )
        self.destination = HandoffDestination(
            arena=self.arena, pool=self.pool, fingerprint=fingerprint, worker_id=worker_id,
            epoch=secrets.token_hex(16), settings=settings, transports=transports, checksums=range_checksums,
            clock=time.monotonic, open_channel=self._open_channel,
            on_complete=self._on_complete, on_failed=self._on_failed, on_expired=self.expired.append,
        )

    def _open_channel(self, address: str) -> grpc.aio.Channel:
        self.channels[address] = connect(address, SECRET)
        return self.channels[address]

    async def start(self) -> None:
        await self.destination.start()

    async def stop(self) -> None:
        await self.destination.stop()
        self.arena.close()

    def reserve_and_pull(self, key: JourneyKey, num_tokens: int, info: SourceInfo) -> None:
        lease = self.destination.reserve(
            key, num_tokens=num_tokens, num_blocks=self.layout.num_blocks_for(num_tokens)
        )
        self.destination.pull(key, lease.lease_id, info)

    async def hold(
        self, key: JourneyKey, address: str, epoch: str, token_ids: Sequence[int], *, num_held_blocks: int = 0,
        lease_ms: int = 10_000, salt: str = "",
    ) -> HeldPrefix | None:
        """Asks a worker to pin what it has of the full blocks of these tokens."""
        hashes = block_hashes(token_ids, fingerprint=FINGERPRINT, salt=salt, block_size=self.layout.block_size)
        wanted = WantedPrefix(
            block_hashes=hashes, token_ids=token_ids[: len(hashes) * self.layout.block_size], cache_salt=salt,
            num_held_blocks=num_held_blocks,
        )
        holder = PrefixSource(address=address, epoch=epoch, num_blocks=len(hashes))
        return await self.destination.hold(key, holder, wanted, lease_ms)

    def pull_prefix(
        self, key: JourneyKey, held: HeldPrefix, *, held_block_ids: Sequence[int] = (), lease_ms: int = 10_000
    ) -> None:
        num_tokens = held.num_blocks * self.layout.block_size
        lease = self.destination.reserve(
            key, num_tokens=num_tokens, num_blocks=held.num_blocks, held_block_ids=held_block_ids, lease_ms=lease_ms,
            is_prefix=True,
        )
        self.destination.pull(key, lease.lease_id, held.source)

    async def end_of(self, key: JourneyKey) -> None:
        """Waits for `on_complete` or `on_failed`."""
        await self._ends.setdefault(key, asyncio.Event()).wait()

    async def result_of(self, key: JourneyKey) -> PullResult:
        await self.end_of(key)
        if key in self.failed:
            raise self.failed[key][0]
        return self.completed[key]

    def contents(self, result: PullResult, num_tokens: int) -> list[bytes]:
        return slots_of(self.arena, result.block_ids, num_tokens)

    def free(self, key: JourneyKey) -> None:
        """What a decode worker does at the end of a sequence."""
        self.pool.release(self.completed[key].block_ids, key.owner)

    def _on_complete(self, key: JourneyKey, result: PullResult) -> None:
        assert key not in self.completed and key not in self.failed, f"{key} ended twice"
        self.completed[key] = result
        self._ends.setdefault(key, asyncio.Event()).set()

    def _on_failed(self, key: JourneyKey, error: PdRelayError, missing: tuple[int, ...]) -> None:
        assert key not in self.completed and key not in self.failed, f"{key} ended twice"
        self.failed[key] = (error, missing)
        self._ends.setdefault(key, asyncio.Event()).set()


def slots_of(arena: Arena, block_ids: Sequence[int], num_tokens: int) -> list[bytes]:
    """Component by component, the first `num_tokens` slots of a sequence in paged blocks."""
    block_size = arena.layout.block_size
    return [
        b"".join(
            bytes(arena.piece(component, block, min(block_size, num_tokens - index * block_size)))
            for index, block in enumerate(block_ids[: arena.layout.num_blocks_for(num_tokens)])
        )
        for component in range(len(arena.layout.components))
    ]


@asynccontextmanager
async def running(*sides: SourceSide | DestinationSide) -> AsyncIterator[None]:
    """Started in order, stopped in reverse."""
    started: list[SourceSide | DestinationSide] = []
    try:
        for side in sides:
            await side.start()
            started.append(side)
        yield
    finally:
        for side in reversed(started):
            await side.stop()
