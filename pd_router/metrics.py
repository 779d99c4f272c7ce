"""What the router counts, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pd_router.journey import Journey
from pd_router.registry import Registry

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Of one router; several may live in one process."""

    def __init__(self, registry: Registry, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        self._collectors = CollectorRegistry()
        collectors = self._collectors
        self._requests = Counter("pd_relay_requests", "Requests by how they ended.", ["end"], registry=collectors)
        self._attempts = Counter("pd_relay_retries", "Attempts after the first of a request.", registry=collectors)
        self._prompt_tokens = Counter("pd_relay_prompt_tokens", "Tokens of prompts.", registry=collectors)
        self._tokens = Counter("pd_relay_generated_tokens", "Tokens generated for clients.", registry=collectors)
        self._drafted = Counter("pd_relay_drafted_tokens", "Draft tokens that were verified.", registry=collectors)
        self._accepted = Counter("pd_relay_accepted_tokens", "Draft tokens that were accepted.", registry=collectors)
        self._handoff_bytes = Counter("pd_relay_handoff_bytes", "Bytes of cache handed over.", registry=collectors)
        self._first_token = Histogram(
            "pd_relay_time_to_first_token_seconds",
            "From admission to the first token.",
            buckets=_SECONDS,
            registry=collectors,
        )
        self._duration = Histogram(
            "pd_relay_request_seconds", "From admission to the end.", buckets=_SECONDS, registry=collectors
        )
        Gauge("pd_relay_running_requests", "Requests in the system.", registry=collectors).set_function(num_running)
        waiting = Gauge("pd_relay_waiting_requests", "Of them, in line for a worker.", registry=collectors)
        waiting.set_function(num_waiting)
        self._workers = Gauge("pd_relay_workers", "Workers by role and state.", ["role", "state"], registry=collectors)
        self._blocks = Gauge("pd_relay_free_blocks", "Free blocks of a worker.", ["worker"], registry=collectors)
        entries = Gauge("pd_relay_index_entries", "Cached blocks, each at one worker, known.", registry=collectors)
        entries.set_function(lambda: registry.index.num_entries)
        left_out = Gauge("pd_relay_index_left_out", "Cached blocks that it had no room for.", registry=collectors)
        left_out.set_function(lambda: registry.index.num_left_out)
        self._breakers = Gauge(
            "pd_relay_open_breakers", "1 for a worker to which nothing is sent, as it fails.", ["worker"],
            registry=collectors,
        )
        self._preempted = Gauge(
            "pd_relay_preempted_sequences", "Sequences of a worker in host memory.", ["worker"], registry=collectors
        )
        self._host_bytes = Gauge(
            "pd_relay_host_cache_bytes", "Host memory that they take.", ["worker"], registry=collectors
        )
        self._moves = Gauge(
            "pd_relay_moves_total", "Sequences that a worker has moved there in its life.", ["worker"],
            registry=collectors,
        )
        self._recomputed = Gauge(
            "pd_relay_recomputed_total", "Choices that a worker has given up for want of room in its life.", ["worker"],
            registry=collectors,
        )
        self._registry = registry

    def note_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def note_end(self, journey: Journey, *, num_prompt_tokens: int, seconds: float) -> None:
        self._requests.labels(journey.state.value).inc()
        self._attempts.inc(max(0, journey.attempt - 1))
        self._prompt_tokens.inc(num_prompt_tokens)
        self._tokens.inc(len(journey.stream.tokens) - journey.stream.num_replayed)
        self._drafted.inc(journey.num_drafted)
        self._accepted.inc(journey.num_accepted)
        if journey.handoff is not None:
            self._handoff_bytes.inc(journey.handoff.num_bytes)
        self._duration.observe(seconds)

    def text(self) -> bytes:
        """The exposition, with the workers as they are now."""
        self._workers.clear()
        for gauge in (self._blocks, self._breakers, self._preempted, self._host_bytes, self._moves, self._recomputed):
            gauge.clear()
        for (role, state), count in Tally((link.role, link.state) for link in self._registry.links()).items():
            self._workers.labels(role.value, state.value).set(count)
        for link in self._registry.links():
            self._breakers.labels(link.worker_id).set(link.breaker.is_open)
            if link.loads is not None:
                self._blocks.labels(link.worker_id).set(link.loads.num_blocks_free)
                self._preempted.labels(link.worker_id).set(link.loads.num_preempted)
                self._host_bytes.labels(link.worker_id).set(link.loads.host_cache_bytes)
                self._moves.labels(link.worker_id).set(link.loads.num_moves_total)
                self._recomputed.labels(link.worker_id).set(link.loads.num_recomputed_total)
        return generate_latest(self._collectors)
