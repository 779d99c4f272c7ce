"""What the page at /ui shows: the router and its workers now, as one JSON document. Totals rise within a worker's
life; the page makes rates of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pd_engine.contracts import worker_pb2 as pb
from pd_router.link import WorkerLink
from pd_router.link_state import Role
from pd_router.registry import Registry
from pd_router.request_metrics import RequestMetrics
from pd_router.worker_metrics import expert_tokens

Document = dict[str, Any]


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
            "model": self._model,
            "requests_running": self._num_running() - waiting,
            "requests_waiting": waiting,
            "router_stage_seconds": self._metrics.own_stages.seconds(),
            "drafted_total": self._metrics.num_drafted,
            "accepted_total": self._metrics.num_accepted,
            "workers": [_worker(link) for link in links],
            "expert_max_over_mean": {
                role.value: [
                    max(row) * len(row) / sum(row) if any(row) else None
                    for row in expert_tokens(self._registry.links(role))
                ]
                for role in Role
            },
        }


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
