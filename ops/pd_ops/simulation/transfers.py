"""The loopback transport between simulated processes: it takes time, stops at cuts, and its writes are watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_transfer.transport import Connection, Fetched, Metadata, Spans
from kv_transfer.transports.loopback import Fault, FaultPlan, LoopbackNetwork, LoopbackPull
from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.errors import DeadlineExceeded
from pd_ops.simulation.network import Network
from pd_ops.simulation.process import Process

LOOK_AGAIN_S = 0.02


@dataclass(kw_only=True, slots=True, eq=False)
class Places:
    """Who serves what over the loopback network.

    Attributes:
        served: by epoch, the process of a source.
    """

    network: LoopbackNetwork = field(default_factory=LoopbackNetwork)
    served: dict[str, Process] = field(default_factory=dict)

    def died(self, process: Process) -> None:
        """Nobody can connect there any more; who has mapped its memory still reads it."""
        for address, served in list(self.network.served.items()):
            if self.served.get(served.epoch) is process:
                del self.network.served[address]


class Target(NamedTuple):
    """A block that a fetch writes to. All attempts of a journey are one owner; a block that was free in between has
    another generation."""

    owners: tuple[str, ...]
    generation: int


class FetchFaults(FaultPlan):
    """Faults of the fetches of one worker: `draw` says what happens to the next one, `stall_s` how long one stalls."""

    def __init__(self, draw: Callable[[], Fault], stall_s: Callable[[], float]) -> None:
        super().__init__()
        self._draw = draw
        self._stall_s = stall_s

    def next(self) -> Fault:
        return self._draw()

    async def wait(self) -> None:
        """Each by itself: what goes on does not wake the others."""
        await asyncio.sleep(self._stall_s())


class WatchedPull:
    """A `PullTransport`: loopback for a simulated puller.

    Args:
        latency_s: of one fetch.
        complain: told of writes to blocks that belong to others by then.
    """

    name = LoopbackPull.name
    capabilities = LoopbackPull.capabilities

    def __init__(
        self, *, puller: Process, network: Network, places: Places, arena: Arena, pool: BlockPool,
        plan: FaultPlan, latency_s: Callable[[], float], complain: Callable[[str], None],
    ) -> None:
        self._puller = puller
        self._network = network
        self._places = places
        self._arena = arena
        self._pool = pool
        self._latency_s = latency_s
        self._complain = complain
        self._pull = LoopbackPull(places.network, arena, plan, self._on_copy)

    async def connect(
        self, metadata: Metadata, *, epoch: str, token: str, num_blocks: int, timeout_s: float
    ) -> Connection:
        source = self._places.served.get(epoch)
        await self.reach(source, timeout_s)
        connection = await self._pull.connect(
            metadata, epoch=epoch, token=token, num_blocks=num_blocks, timeout_s=timeout_s
        )
        return WatchedConnection(self, connection, source)

    async def close(self) -> None:
        await self._pull.close()

    async def reach(self, source: Process | None, timeout_s: float) -> None:
        """Takes as long as one message, longer over a cut.

        Raises:
            DeadlineExceeded: the cut or the stop lasts.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        await asyncio.sleep(self._latency_s())
        while source is not None and (source.is_stopped or self._network.is_cut(self._puller, source)):
            if loop.time() >= end_s:
                raise DeadlineExceeded(f"{source.name} is not to be reached")
            await asyncio.sleep(LOOK_AGAIN_S)

    def targets(self, spans: Spans) -> dict[int, Target]:
        """The blocks that a fetch writes to, as they are now."""
        return {block: self._target(block) for block in map(self._block_at, spans.offsets.tolist())}

    def _on_copy(self, offset: int, length: int) -> None:
        block = self._block_at(offset)
        now, before = self._target(block), FETCH_TARGETS.get()[block]
        fetch = f"a fetch for {' and '.join(before.owners)} writes to block {block}"
        if now.owners and now.owners != before.owners:
            self._complain(f"{fetch} of {' and '.join(now.owners)}")
        elif self._pool.is_free(block):
            self._complain(f"{fetch}, which is free")
        elif now.generation != before.generation:
            self._complain(f"{fetch}, which has been given away since")

    def _target(self, block: int) -> Target:
        return Target(tuple(self._pool.owners(block)), int(self._arena.generations[block]))

    def _block_at(self, offset: int) -> int:
        component = max(index for index, start in enumerate(self._arena.offsets) if start <= offset)
        return (offset - self._arena.offsets[component]) // self._arena.layout.piece_bytes(component)


class WatchedConnection:
    def __init__(self, pull: WatchedPull, connection: Connection, source: Process | None) -> None:
        self._pull = pull
        self._connection = connection
        self._source = source

    async def fetch(self, spans: Spans, *, token: str, timeout_s: float) -> Fetched:
        FETCH_TARGETS.set(self._pull.targets(spans))  # a fetch has a task of its own
        await self._pull.reach(self._source, timeout_s)
        return await self._connection.fetch(spans, token=token, timeout_s=timeout_s)

    async def quiesce(self) -> None:
        await self._connection.quiesce()

    @property
    def usable(self) -> bool:
        return self._connection.usable

    async def close(self) -> None:
        await self._connection.close()


FETCH_TARGETS: ContextVar[dict[int, Target]] = ContextVar("fetch_targets")
