"""What a router tells of itself and its workers, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest

from pd_router.registry import Registry
from pd_router.request_metrics import RequestMetrics
from pd_router.worker_metrics import WorkerMetrics


class Metrics(RequestMetrics):
    """Of one router; several may live in one process.

    Args:
        model: the served name.
    """

    def __init__(
        self, registry: Registry, model: str, num_running: Callable[[], int], num_waiting: Callable[[], int]
    ) -> None:
        self._all = CollectorRegistry()
        super().__init__(self._all, model, num_running, num_waiting)
        self._all.register(WorkerMetrics(registry, model))

    def text(self) -> bytes:
        """The exposition, with the workers as they are now."""
        return generate_latest(self._all)
