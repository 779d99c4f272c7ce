"""What a pd-relay's pools looked like while it was measured: free blocks, sequences in host memory, waiting ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from pd_engine.contracts import api_pb2
from pd_engine.errors import PdRelayError
from pd_ops.client import RouterClient
from pd_ops.output import Document

INTERVAL_S = 1.0


class PoolWatch:
    """Attributes:
    samples: one a second, as far as the router answered.
    """

    def __init__(self, client: RouterClient) -> None:
        self._client = client
        self.samples: list[Document] = []

    async def run(self, now: Callable[[], float]) -> None:
        """Until it is cancelled."""
        while True:
            with contextlib.suppress(PdRelayError):
                self.samples.append(_sample(await self._client.server_info(), now()))
            await asyncio.sleep(INTERVAL_S)


def _sample(info: api_pb2.GetServerInfoResponse, at_s: float) -> Document:
    pools = {}
    for role in ("prefill", "decode"):
        workers = [worker for worker in info.workers if worker.role == role]
        pools[role] = {
            "ready": sum(worker.state == "ready" for worker in workers),
            "num_blocks_total": sum(worker.num_blocks_total for worker in workers),
            "num_blocks_free": sum(worker.num_blocks_free for worker in workers),
            "num_running": sum(worker.num_running for worker in workers),
            "num_waiting": sum(worker.num_waiting for worker in workers),
            "num_preempted": sum(worker.num_preempted for worker in workers),
            "num_moves_total": sum(worker.num_moves_total for worker in workers),
            "num_recomputed_total": sum(worker.num_recomputed_total for worker in workers),
        }
    return {"at_s": at_s, "active_requests": info.active_requests, **pools}
