"""Every transport with both halves in this process, ready to fetch between two arenas: for the conformance suite."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from kv_transfer.transport import Connection, PullTransport, SourceTransport, Spans
from kv_transfer.transports.choice import host_facts
from kv_transfer.transports.loopback import LoopbackNetwork, LoopbackPull, LoopbackSource
from kv_transfer.transports.nccl import NcclPull
from kv_transfer.transports.nccl_source import NcclSource
from kv_transfer.transports.nixl import NixlPull
from kv_transfer.transports.nixl_agent import make_nixl_agent
from kv_transfer.transports.nixl_source import NixlSource
from kv_transfer.transports.shared_memory import SharedMemoryPull, SharedMemorySource
from kv_transfer.transports.tcp import TcpPull
from kv_transfer.transports.tcp_source import TcpSource
from pd_engine.cache.arena import Arena
from pd_engine.cache.layout import CacheLayout
from pd_kernels.block_copy import copy_and_checksum_pieces
from pd_kernels.block_stream import receive_and_checksum_pieces
from support.fake_nccl import FakeNccl
from support.fake_nixl import FakeNixlAgent
from support.handoffs import LAYOUT, SECRET, fill_random

TRANSPORTS = (
    "loopback", "shared_memory", "tcp", "fake nixl", "fake nccl", *(["nixl"] if host_facts().has_nixl else [])
)
EPOCH = "e" * 32
TIMEOUT_S = 20.0


@dataclass
class Pair:
    """A source and a puller of one transport.

    Attributes:
        allowed: blocks by token: what `authorize` answers from.
    """

    source_arena: Arena
    arena: Arena
    source: SourceTransport
    pull: PullTransport
    make_pull: Callable[[str], PullTransport]
    allowed: dict[str, frozenset[int]] = field(default_factory=dict)

    def new_token(self, blocks: frozenset[int] | None = None) -> str:
        token = secrets.token_hex(16)
        self.allowed[token] = frozenset(range(self.source_arena.num_blocks)) if blocks is None else blocks
        return token

    async def connect(self, token: str | None = None, *, epoch: str = EPOCH) -> Connection:
        return await self.pull.connect(
            self.source.metadata(), epoch=epoch, token=token or self.new_token(),
            num_blocks=self.source_arena.num_blocks, timeout_s=TIMEOUT_S,
        )

    def spans(self, pieces: list[tuple[int, int, int, int, int]]) -> Spans:
        """From (component, source block, own block, first slot, number of slots)."""
        layout = self.source_arena.layout
        slot = [layout.components[component].slot_bytes for component, *_ in pieces]
        columns = {
            "block_ids": [source for _, source, _, _, _ in pieces],
            "source_offsets": [
                self.source_arena.piece_offset(component, source) + first * size
                for (component, source, _, first, _), size in zip(pieces, slot, strict=True)
            ],
            "offsets": [
                self.arena.piece_offset(component, own) + first * size
                for (component, _, own, first, _), size in zip(pieces, slot, strict=True)
            ],
            "lengths": [count * size for (*_, count), size in zip(pieces, slot, strict=True)],
        }
        return Spans(**{name: np.array(values, dtype=np.int64) for name, values in columns.items()})

    def expected(self, spans: Spans) -> bytes:
        """The whole arena as it should be after a fetch, from what it is now."""
        image = bytearray(self.arena.buffer)
        for start, target, length in zip(
            spans.source_offsets.tolist(), spans.offsets.tolist(), spans.lengths.tolist(), strict=True
        ):
            image[target : target + length] = self.source_arena.buffer[start : start + length]
        return bytes(image)


@asynccontextmanager
async def transport_pair(
    name: str, *, layout: CacheLayout = LAYOUT, num_source_blocks: int = 24, num_blocks: int = 40
) -> AsyncIterator[Pair]:
    source_arena, arena = Arena(layout, num_source_blocks), Arena(layout, num_blocks)
    fill_random(source_arena, 3)
    fill_random(arena, 4)
    network = LoopbackNetwork()
    makers: dict[str, tuple[Callable[[], SourceTransport], Callable[[str], PullTransport]]] = {
        "loopback": (lambda: LoopbackSource(network), lambda secret: LoopbackPull(network, arena)),
        "shared_memory": (
            lambda: SharedMemorySource(secret=SECRET),
            lambda secret: SharedMemoryPull(arena, secret=secret, copy=copy_and_checksum_pieces),
        ),
        **{name: (
            lambda make=make: NixlSource(secret=SECRET, host="127.0.0.1", make_agent=make),
            lambda secret, make=make: NixlPull(
                arena, secret=secret, copy=copy_and_checksum_pieces, make_agent=make
            ),
        ) for name, make in (("nixl", make_nixl_agent), ("fake nixl", FakeNixlAgent))},
        "fake nccl": (
            lambda: NcclSource(secret=SECRET, host="127.0.0.1", make_nccl=lambda: FakeNccl.shared),
            lambda secret: NcclPull(arena, secret=secret, make_nccl=lambda: FakeNccl.shared),
        ),
        "tcp": (
            lambda: TcpSource(secret=SECRET, host="127.0.0.1"),
            lambda secret: TcpPull(arena, secret=secret, receive=receive_and_checksum_pieces),
        ),
    }
    make_source, make_pull = makers[name]
    pair = Pair(source_arena, arena, make_source(), make_pull(SECRET), make_pull)
    await pair.source.start(source_arena, EPOCH, pair.allowed.get)
    try:
        yield pair
    finally:
        await pair.pull.close()
        await pair.source.stop()
        arena.close()
        source_arena.close()
        await asyncio.sleep(0)
