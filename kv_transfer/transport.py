"""What a transport is: it moves byte ranges from a source's arena into the puller's and reads generations around
each copy. It decides nothing: the destination verifies.

A transport has two halves. `SourceTransport` serves an arena to authenticated pullers; `PullTransport` connects to
one such server and fetches. Both halves may use threads of their own; neither touches the handoff's state.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pd_engine.cache.arena import Arena

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

Copy = Callable[[Bytes, Bytes, Int64s, Int64s, Int64s], UInt64s | None]
"""(source, destination, source offsets, destination offsets, lengths) -> checksums of the ranges, unless they are off:
see `pd_kernels.block_copy`."""

Receive = Callable[[socket.socket, Bytes, Int64s, Int64s, Bytes], UInt64s | None]
"""(blocking socket, destination, offsets, lengths, stop) -> checksums of the ranges, unless they are off: see
`pd_kernels.block_stream`."""

Checksums = Callable[[Bytes, Int64s, Int64s], UInt64s]
"""One checksum a range of a buffer: (buffer, offsets, lengths); `pd_kernels.block_checksum.ranges`."""


class Ending(Enum):
    """How a fetch that nobody wants any more is kept from writing."""

    CANCEL = "cancel"    # the fetch itself stops
    REVOKE = "revoke"    # the connection is closed, and with it all its fetches
    STAGING = "staging"  # data lands in memory of the transport and is copied after the fetch


class ChecksumAt(Enum):
    """Where the puller's checksums of a fetch are taken."""

    COPY = "copy"        # in the pass that copies: every byte is read once
    ARRIVAL = "arrival"  # on the way from the socket to the arena, while they are in the cache
    ARENA = "arena"      # over the puller's arena, after the fetch


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a transport can do.

    Attributes:
        ending: how a fetch is stopped.
        ending_ms: how long after `Connection.stop` a byte may still land, at most.
        one_sided: the source's process takes no part in a fetch (a stopped source costs nothing).
        across_hosts: works between hosts.
        device_memory: can move memory of an accelerator.
        checksum_at: when its checksums are taken. The source's are taken when it publishes, whatever the transport.
    """

    ending: Ending
    ending_ms: int
    one_sided: bool
    across_hosts: bool
    device_memory: bool = False
    checksum_at: ChecksumAt = ChecksumAt.ARENA


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """Byte ranges to fetch, as parallel arrays of one length n.

    Attributes:
        block_ids: int64, the source's block of each range: whose generation is read.
        source_offsets: int64, bytes from the start of the source's arena.
        offsets: int64, bytes from the start of the puller's arena.
        lengths: int64, bytes, each > 0.
    """

    block_ids: Int64s
    source_offsets: Int64s
    offsets: Int64s
    lengths: Int64s

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def part(self, ranges: slice) -> Spans:
        return Spans(
            block_ids=self.block_ids[ranges], source_offsets=self.source_offsets[ranges],
            offsets=self.offsets[ranges], lengths=self.lengths[ranges],
        )


def runs_of(lengths: Int64s, run_bytes: int) -> list[slice]:
    """Consecutive ranges in runs of about `run_bytes` each."""
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // run_bytes)) + 1
    return [slice(start, end) for start, end in itertools.pairwise([0, *cuts.tolist(), len(lengths)])]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fetched:
    """What came of a fetch of n ranges.

    Attributes:
        generations_before, generations_after: uint64 [n], the source's generation of each range's block, read before
            and after its copy.
        checksums: uint64 [n], of what was written for each range; None if they are yet to be taken (`ChecksumAt.ARENA`,
            or checksums are off).
    """

    generations_before: UInt64s
    generations_after: UInt64s
    checksums: UInt64s | None = None


Authorize = Callable[[str], "frozenset[int] | None"]
"""The blocks that a token may read, or None: no such handoff (any more). Thread-safe."""

Metadata = Mapping[str, Any]
"""How to connect: msgpack-able; it comes from the peer, so a puller checks every field."""


class SourceTransport(Protocol):
    """Serves one arena."""

    @property
    def name(self) -> str: ...

    async def start(self, arena: Arena, epoch: str, authorize: Authorize) -> None:
        """Begins to serve. Who cannot prove that he knows the cluster secret gets nothing."""

    def metadata(self) -> Metadata:
        """How pullers connect; goes into a manifest's opening."""

    async def stop(self) -> None:
        """Stops serving and closes everything."""


class Connection(Protocol):
    """One puller's way to one life of one source."""

    async def fetch(self, spans: Spans, *, token: str, timeout_s: float) -> Fetched:
        """Copies the ranges into the puller's arena.

        If it raises or is cancelled, bytes may still land until `quiesce` has returned.

        Raises:
            Gone: the token is not (any more) valid for these blocks.
            Unavailable: the peer is dead or unreachable.
            DeadlineExceeded: it took longer than `timeout_s`.
        """

    async def quiesce(self) -> None:
        """Returns when no fetch that has raised or was cancelled can write any more; bounded by the capability's
        `ending_ms`. May close the connection."""

    @property
    def usable(self) -> bool:
        """Whether another fetch may be tried on it."""

    async def close(self) -> None: ...


class PullTransport(Protocol):
    """Fetches into one arena."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def connect(
        self, metadata: Metadata, *, epoch: str, token: str, num_blocks: int, timeout_s: float
    ) -> Connection:
        """A connection to the source's life `epoch`, whose arena has `num_blocks` blocks of the puller's layout.

        Raises:
            InvalidArgument: the metadata are malformed.
            Unauthenticated: the peer does not know the cluster secret, or refuses ours.
            Gone: another epoch lives there now.
            Unavailable, DeadlineExceeded: as for `fetch`.
        """

    async def close(self) -> None: ...
