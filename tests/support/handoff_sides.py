"""The workers, messages and transfers of a `World`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_transfer.destination_book import DestinationBook
from kv_transfer.destination_state import Fetch, LeaseRecord
from kv_transfer.holds import PrefixHolder
from kv_transfer.journey import JourneyKey
from kv_transfer.publisher import Progress
from kv_transfer.source import OnEnd
from kv_transfer.source_book import SourceBook
from kv_transfer.source_state import SourceHandoff
from kv_transfer.transport import Checksums, Fetched, Spans
from kv_transfer.verification import verify
from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.prefix import PrefixCache
from pd_kernels.block_checksum.ranges import range_checksums
from support.handoff_prompt import Prompt

Verify = Callable[[Fetch, Fetched, Arena, Checksums | None], npt.NDArray[np.bool_]]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The production classes; a test that plants a bug puts its own in."""

    source_book: type[SourceBook] = SourceBook
    destination_book: type[DestinationBook] = DestinationBook
    verify: Verify = verify
    checksums: Checksums | None = range_checksums
    holder: type[PrefixHolder] = PrefixHolder


@dataclass(eq=False)
class Side:
    """A life of a worker: arena, pool, and blocks that others use meanwhile."""

    arena: Arena
    pool: BlockPool
    epoch: str
    strangers: dict[str, tuple[list[int], bytes]] = field(default_factory=dict)

    def add_stranger(self, name: str, count: int) -> None:
        """Somebody else's request takes blocks and writes to them."""
        count = min(count, self.pool.num_free)
        if count:
            image = secrets.token_bytes(self.arena.layout.block_bytes * count)
            self.strangers[name] = (self.pool.allocate(count, name), image)
            self._views(name, lambda view, data: view.__setitem__(slice(None), data))

    def end_stranger(self, name: str) -> None:
        self.check_stranger(name)
        blocks, _ = self.strangers.pop(name)
        self.pool.release(blocks, name)

    def check_stranger(self, name: str) -> None:
        def compare(view: memoryview, data: bytes) -> None:
            assert bytes(view) == data, f"{name}'s block was overwritten"

        self._views(name, compare)

    def _views(self, name: str, act: Callable[[memoryview, bytes], None]) -> None:
        blocks, image = self.strangers[name]
        start = 0
        for block in blocks:
            for component in range(len(self.arena.layout.components)):
                view = self.arena.piece(component, block)
                act(view, image[start : start + len(view)])
                start += len(view)


@dataclass(eq=False)
class Source(Side):
    book: SourceBook = None  # type: ignore[assignment]
    cache: PrefixCache = None  # type: ignore[assignment]
    holder: PrefixHolder = None  # type: ignore[assignment]
    blocks: dict[JourneyKey, list[int]] = field(default_factory=dict)
    holds: dict[JourneyKey, OnEnd] = field(default_factory=dict)  # prefixes pinned for others, among the blocks
    jobs: dict[JourneyKey, Job] = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    """A prefill under way: how many tokens of each component are computed."""

    handoff: SourceHandoff
    progress: Progress
    prompt: Prompt
    computed: list[int]


@dataclass(eq=False)
class Destination(Side):
    book: DestinationBook = None  # type: ignore[assignment]
    running: dict[JourneyKey, tuple[int, ...]] = field(default_factory=dict)  # handed over to the batch
    ends: dict[JourneyKey, str] = field(default_factory=dict)


@dataclass(eq=False)
class Stream:
    """A manifest on its way."""

    destination: Destination
    lease: LeaseRecord
    source: Source
    handoff: SourceHandoff
    num_sent: int = 0
    is_open: bool = False


@dataclass(eq=False)
class Transfer:
    """A fetch on its way: ranges arrive when the test says so, wanted or not, until it is quiesced."""

    destination: Destination
    fetch: Fetch
    spans: Spans
    source_arena: Arena
    before: npt.NDArray[np.uint64]
    num_copied: int = 0
    is_given_up: bool = False
    is_clean: bool = True
