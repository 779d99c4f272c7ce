"""The transports, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.transport import PullTransport, SourceTransport
from pd_engine.cache.arena import Arena
from pd_engine.settings import TransferSettings


def source_transports(settings: TransferSettings, *, secret: str, host: str) -> Sequence[SourceTransport]:
    """What a worker offers to its pullers under these settings.

    Args:
        secret: of the cluster; a puller proves that it knows it, it never travels.
        host: the address to listen on for pullers of other hosts.
    """
    raise NotImplementedError


def pull_transports(settings: TransferSettings, arena: Arena, *, secret: str) -> Sequence[PullTransport]:
    """What a worker can pull with, best first."""
    raise NotImplementedError
