"""The transports, and the choice between them.

By setting: `shared_memory` or `tcp` alone, or `auto`: both are offered, and each pull takes the first of the puller's
list that the source offers too and that reaches its host (`peers.Peers`), which says so in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_transfer.transport import PullTransport, SourceTransport
from kv_transfer.transports.shared_memory import SharedMemoryPull, SharedMemorySource
from kv_transfer.transports.tcp import TcpPull
from kv_transfer.transports.tcp_source import TcpSource
from pd_engine.cache.arena import Arena
from pd_engine.settings import TransferSettings
from pd_kernels.block_checksum.ranges import range_checksums
from pd_kernels.block_copy import copy_and_checksum_pieces, copy_pieces

BEST_FIRST = ("shared_memory", "tcp")


def transport_names(settings: TransferSettings) -> tuple[str, ...]:
    """What the setting allows, best first."""
    return BEST_FIRST if settings.transport == "auto" else (settings.transport,)


def source_transports(settings: TransferSettings, *, secret: str, host: str) -> Sequence[SourceTransport]:
    """What a worker offers to its pullers under these settings.

    Args:
        secret: of the cluster; a puller proves that it knows it, it never travels.
        host: the address to listen on for pullers of other hosts, and what they are told.
    """
    made: dict[str, Callable[[], SourceTransport]] = {
        "shared_memory": lambda: SharedMemorySource(secret=secret),
        "tcp": lambda: TcpSource(secret=secret, host=host),
    }
    return [made[name]() for name in transport_names(settings)]


def pull_transports(settings: TransferSettings, arena: Arena, *, secret: str) -> Sequence[PullTransport]:
    """What a worker can pull with, best first."""
    copy = copy_and_checksum_pieces if settings.checksums else copy_pieces
    checksums = range_checksums if settings.checksums else None
    made: dict[str, Callable[[], PullTransport]] = {
        "shared_memory": lambda: SharedMemoryPull(arena, secret=secret, copy=copy),
        "tcp": lambda: TcpPull(arena, secret=secret, checksums=checksums),
    }
    return [made[name]() for name in transport_names(settings)]
