"""What the page at /ui shows: the router and its workers now, as one JSON document, and as they were in the last five
minutes. Totals rise within a worker's life; the page makes rates of them."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

from pd_engine.contracts import worker_pb2 as pb
from pd_router.link import WorkerLink
from pd_router.link_state import Role
from pd_router.registry import Registry
from pd_router.request_metrics import RequestMetrics
from pd_router.worker_metrics import busiest_over_mean

Document = dict[str, Any]
NUM_PAST = 300
EVERY_S = 1.0
MAX_PAST_BYTES = 4 * 1024 * 1024  # compressed; with very many workers the past is shorter


class LiveView:
    def __init__(
        self, registry: Registry, model: str, num_running: Callable[[], int], num_waiting: Callable[[], int],
        metrics: RequestMetrics,
    ) -> None:
        self._metrics = metrics
        self._registry = registry
        self._model = model
        self._num_running = num_running
        self._num_waiting = num_waiting

    def document(self) -> Document:
        links = self._registry.links()
        waiting = self._num_waiting()
        return {
            "clock_s": time.monotonic(),
            "model": self._model,
            "requests_running": self._num_running() - waiting,
            "requests_waiting": waiting,
            "router_stage_seconds": self._metrics.own_stages.seconds(),
            "drafted_total": self._metrics.num_drafted,
            "accepted_total": self._metrics.num_accepted,
            "handoffs_total": self._metrics.num_handoffs,
            "handoff_bytes_total": self._metrics.num_handoff_bytes,
            "workers": [_worker(link) for link in links],
            "expert_max_over_mean": {
                role.value: busiest_over_mean(self._registry.links(role)) for role in Role
            },
        }


class LivePast:
    """What somebody would have seen who had looked all the while, so that the page has a past when it is opened."""

    def __init__(self, live: LiveView) -> None:
        self._live = live
        self._looks: deque[bytes] = deque(maxlen=NUM_PAST)

    async def keep(self) -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        self._looks.append(zlib.compress(json.dumps(self._live.document()).encode(), 1))
        while sum(map(len, self._looks)) > MAX_PAST_BYTES:
            self._looks.popleft()

    async def text(self) -> bytes:
        """A JSON list of documents, the oldest first. Made beside the event loop: it may be many megabytes."""
        return await asyncio.to_thread(_text, list(self._looks))


def _text(looks: list[bytes]) -> bytes:
    return b"[" + b",".join(map(zlib.decompress, looks)) + b"]"


def _worker(link: WorkerLink) -> Document:
    loads = link.loads or pb.LoadsReply()
    return {
        "id": link.worker_id,
        "role": link.role.value,
        "state": link.state.value,
        "breaker_open": link.breaker.is_open,
        "epoch": link.epoch,
        "blocks": loads.num_blocks_total,
        "blocks_free": loads.num_blocks_free,
        "blocks_quarantined": loads.num_quarantined_blocks,
        "running": loads.num_running,
        "waiting": loads.num_waiting,
        "preempted": loads.num_preempted,
        "leases": loads.num_leases,
        "pins": loads.num_pins,
        "queued_prefill_tokens": loads.queued_prefill_tokens,
        "prefill_tokens_per_s": loads.prefill_tokens_per_s,
        "itl_ms": loads.itl_ms,
        "resident_bytes": loads.rss_bytes,
        "fetched_bytes_total": loads.fetched_bytes_total,
        "stage_seconds": {time.stage: time.seconds for time in loads.stages},
        "watched_seconds": loads.watched_seconds,
    }
