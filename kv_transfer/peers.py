"""Channels and connections to sources, shared by all pulls from the same one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from kv_transfer.journey import Clock, SourceInfo
from kv_transfer.manifest import Opening
from kv_transfer.transport import Connection, PullTransport
from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_engine.service.client import kv_source_stub, worker_stub

if TYPE_CHECKING:
    from pd_engine.contracts.worker_pb2_grpc import KvSourceAsyncStub, WorkerAsyncStub

log = logging.getLogger(__name__)

IDLE_S = 60.0


@dataclass(slots=True)
class _Channel:
    channel: grpc.aio.Channel
    stub: KvSourceAsyncStub
    worker: WorkerAsyncStub
    used_s: float


@dataclass(slots=True, eq=False)
class Link:
    """A connection and how many pulls use it; `num_arena_blocks`: of the source, as it was opened."""

    connection: Connection
    transport: PullTransport
    num_arena_blocks: int
    used_s: float
    num_pulls: int = 0


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class Peers:
    """Args:
    transports: best first.
    host_id: of this process.
    """

    def __init__(
        self, transports: Sequence[PullTransport], open_channel: Callable[[str], grpc.aio.Channel], host_id: str,
        clock: Clock,
    ) -> None:
        self._transports = transports
        self._open_channel = open_channel
        self._host_id = host_id
        self._clock = clock
        self._channels: dict[tuple[str, str], _Channel] = {}  # by (address, epoch)
        self._links: dict[tuple[str, str], Link] = {}  # by (epoch, name of the transport)
        self._turns: dict[tuple[str, str], _Turn] = {}  # who opens or closes a link, one at a time

    def stub(self, address: str, epoch: str) -> KvSourceAsyncStub:
        """Calls to that life of the source at `address`. A new life has a channel of its own: that of the last one
        may still wait before it tries to connect again."""
        return self._channel(address, epoch).stub

    def worker_stub(self, address: str, epoch: str) -> WorkerAsyncStub:
        """Calls to the worker that are not about a transfer."""
        return self._channel(address, epoch).worker

    async def acquire(self, source: SourceInfo, opening: Opening, timeout_s: float) -> Link:
        """A connection over the best transport that both sides have; `release` it afterwards.

        Raises:
            FailedPrecondition: there is none.
            InvalidArgument: the source says that its arena is of another size than when it was connected.
            Unavailable, Unauthenticated, Gone, InvalidArgument, DeadlineExceeded: see `PullTransport.connect`.
        """
        transport = self._choose(opening)
        key = (source.epoch, transport.name)
        async with self._turn(key):
            link = self._links.get(key)
            if link is not None and not link.connection.usable:
                await self._drop(key)
                link = None
            if link is None:
                connection = await transport.connect(
                    opening.transports[transport.name], epoch=source.epoch, token=source.token,
                    num_blocks=opening.num_arena_blocks, timeout_s=timeout_s,
                )
                log.info("connected to %s (epoch %s) over %s", opening.worker_id, source.epoch, transport.name)
                link = self._links[key] = Link(connection, transport, opening.num_arena_blocks, self._clock())
        if opening.num_arena_blocks != link.num_arena_blocks:
            raise InvalidArgument(
                f"num_arena_blocks of {opening.worker_id} must be {link.num_arena_blocks}, as it was when it was "
                f"connected, got {opening.num_arena_blocks}"
            )
        link.num_pulls += 1
        return link

    def release(self, link: Link) -> None:
        link.num_pulls -= 1
        link.used_s = self._clock()

    @property
    def is_empty(self) -> bool:
        """There is nothing to sweep."""
        return not self._links and not self._channels

    async def sweep(self) -> None:
        """Closes what is broken or has been idle for long."""
        too_old_s = self._clock() - IDLE_S
        for key in list(self._links):
            link = self._links.get(key)
            if link is None or link.num_pulls or key in self._turns:
                continue  # gone meanwhile, in use, or about to be
            if not link.connection.usable or link.used_s < too_old_s:
                async with self._turn(key):
                    await self._drop(key)
        pulling = {epoch for (epoch, _), link in self._links.items() if link.num_pulls}
        idle = [life for life, entry in self._channels.items() if entry.used_s < too_old_s and life[1] not in pulling]
        for entry in [self._channels.pop(life) for life in idle]:
            await entry.channel.close()

    async def close(self) -> None:
        for key in list(self._links):
            await self._drop(key)
        for transport in self._transports:
            await transport.close()
        while self._channels:
            _, entry = self._channels.popitem()
            await entry.channel.close()

    def _channel(self, address: str, epoch: str) -> _Channel:
        entry = self._channels.get((address, epoch))
        if entry is None:
            channel = self._open_channel(address)
            entry = _Channel(channel, kv_source_stub(channel), worker_stub(channel), 0.0)
            self._channels[address, epoch] = entry
        entry.used_s = self._clock()
        return entry

    @asynccontextmanager
    async def _turn(self, key: tuple[str, str]) -> AsyncIterator[None]:
        turn = self._turns.setdefault(key, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._turns[key]

    async def _drop(self, key: tuple[str, str]) -> None:
        link = self._links.pop(key)
        await link.connection.close()

    def _choose(self, opening: Opening) -> PullTransport:
        is_same_host = opening.host_id == self._host_id
        for transport in self._transports:
            if transport.name in opening.transports and (is_same_host or transport.capabilities.across_hosts):
                return transport
        ours = ", ".join(transport.name for transport in self._transports) or "none"
        raise FailedPrecondition(
            f"no common transport: {opening.worker_id} offers {', '.join(opening.transports) or 'none'}, this worker "
            f"has {ours}, and they are on {'one host' if is_same_host else 'different hosts'}"
        )
