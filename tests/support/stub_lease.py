"""What a stub decode worker has granted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pd_engine.contracts import worker_pb2 as pb

LEASE_MS = 10_000


@dataclass
class Lease:
    request: pb.ReserveRequest
    lease_id: str
    num_blocks: int
    task: asyncio.Task[None] | None = None
