"""The transports, and the choice between them: `choice` says what a worker offers, and each pull takes the first of the
puller's list that the source offers too and that reaches its host (`peers.Peers`). Both are logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kv_transfer.transport import PullTransport, SourceTransport
from kv_transfer.transports.choice import TRANSPORT_NAMES, host_facts, transport_names, why
from kv_transfer.transports.nccl import NcclPull
from kv_transfer.transports.nccl_source import NcclSource
from kv_transfer.transports.nixl import NixlPull
from kv_transfer.transports.nixl_source import NixlSource
from kv_transfer.transports.shared_memory import SharedMemoryPull, SharedMemorySource
from kv_transfer.transports.tcp import TcpPull
from kv_transfer.transports.tcp_source import TcpSource
from pd_engine.cache.arena import Arena
from pd_engine.settings import TransferSettings
from pd_kernels.block_copy import copy_and_checksum_pieces, copy_pieces
from pd_kernels.block_stream import receive_and_checksum_pieces, receive_pieces

__all__ = ["BEST_FIRST", "TRANSPORT_NAMES", "pull_transports", "source_transports"]

log = logging.getLogger(__name__)

BEST_FIRST = ("shared_memory", "tcp")  # what needs no extra


def source_transports(settings: TransferSettings, *, secret: str, host: str) -> Sequence[SourceTransport]:
    """What a worker offers to its pullers under these settings.

    Args:
        secret: of the cluster; a puller proves that it knows it, it never travels.
        host: the address to listen on for pullers of other hosts, and what they are told.
    """
    made: dict[str, Callable[[], SourceTransport]] = {
        "shared_memory": lambda: SharedMemorySource(secret=secret),
        "nccl": lambda: NcclSource(secret=secret, host=host),
        "nixl": lambda: NixlSource(secret=secret, host=host),
        "tcp": lambda: TcpSource(secret=secret, host=host),
    }
    return [made[name]() for name in _names(settings)]


def pull_transports(settings: TransferSettings, arena: Arena, *, secret: str) -> Sequence[PullTransport]:
    """What a worker can pull with, best first."""
    copy = copy_and_checksum_pieces if settings.checksums else copy_pieces
    receive = receive_and_checksum_pieces if settings.checksums else receive_pieces
    made: dict[str, Callable[[], PullTransport]] = {
        "shared_memory": lambda: SharedMemoryPull(arena, secret=secret, copy=copy),
        "nccl": lambda: NcclPull(arena, secret=secret),
        "nixl": lambda: NixlPull(arena, secret=secret, copy=copy),
        "tcp": lambda: TcpPull(arena, secret=secret, receive=receive),
    }
    return [made[name]() for name in _names(settings)]


def _names(settings: TransferSettings) -> tuple[str, ...]:
    facts = host_facts()
    log.info("%s", why(settings.transport, facts))
    return transport_names(settings.transport, facts)
