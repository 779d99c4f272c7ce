"""The transports, and the choice between them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kv_transfer.transport import PullTransport, SourceTransport
from kv_transfer.transports.shared_memory import SharedMemoryPull, SharedMemorySource
from pd_engine.cache.arena import Arena
from pd_engine.settings import TransferSettings
from pd_kernels.block_copy.reference import copy_pieces

log = logging.getLogger(__name__)


def source_transports(settings: TransferSettings, *, secret: str, host: str) -> Sequence[SourceTransport]:
    """What a worker offers to its pullers under these settings.

    Args:
        secret: of the cluster; a puller proves that it knows it, it never travels.
        host: the address to listen on for pullers of other hosts.
    """
    return [SharedMemorySource(secret=secret)]


def pull_transports(settings: TransferSettings, arena: Arena, *, secret: str) -> Sequence[PullTransport]:
    """What a worker can pull with, best first."""
    return [SharedMemoryPull(arena, secret=secret, copy=copy_pieces)]
