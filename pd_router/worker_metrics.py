"""What the router's last reports say of its workers. Made at each scrape, of the workers that there are: their ids are
the labels, so that what is gone leaves no series behind."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_engine.contracts import worker_pb2 as pb
from pd_router.link import WorkerLink
from pd_router.link_state import Role
from pd_router.registry import Registry

Value = Callable[[pb.LoadsReply], float]


@dataclass(frozen=True, slots=True)
class WorkerMetric:
    """A counter begins anew with each life of its worker."""

    name: str
    documentation: str
    value: Value
    is_counter: bool = False


OF_WORKERS = (
    WorkerMetric("pdrelay_blocks", "Blocks of a worker.", lambda loads: loads.num_blocks_total),
    WorkerMetric("pdrelay_free_blocks", "Of them, free or only cached.", lambda loads: loads.num_blocks_free),
    WorkerMetric(
        "pdrelay_quarantined_blocks", "Of them, not used until a transfer has ended.",
        lambda loads: loads.num_quarantined_blocks,
    ),
    WorkerMetric("pdrelay_leases", "Leases that hold blocks there.", lambda loads: loads.num_leases),
    WorkerMetric(
        "pdrelay_expired_leases", "Leases that nobody renewed.", lambda loads: loads.num_expired_leases_total, True
    ),
    WorkerMetric("pdrelay_pins", "Handoffs and prefixes that it serves.", lambda loads: loads.num_pins),
    WorkerMetric("pdrelay_running_sequences", "In its last step.", lambda loads: loads.num_running),
    WorkerMetric("pdrelay_waiting_sequences", "There, but not in a step.", lambda loads: loads.num_waiting),
    WorkerMetric(
        "pdrelay_queued_prefill_tokens", "Of prompts that wait there to be computed.",
        lambda loads: loads.queued_prefill_tokens,
    ),
    WorkerMetric(
        "pdrelay_prefill_tokens_per_second", "As measured in its last prompts.",
        lambda loads: loads.prefill_tokens_per_s,
    ),
    WorkerMetric("pdrelay_step_seconds", "Between two tokens of a sequence there.", lambda loads: loads.itl_ms / 1000),
    WorkerMetric("pdrelay_preempted_sequences", "In its host memory.", lambda loads: loads.num_preempted),
    WorkerMetric("pdrelay_host_cache_bytes", "Host memory that they take.", lambda loads: loads.host_cache_bytes),
    WorkerMetric(
        "pdrelay_recomputed_choices", "Given up for want of room, and placed again.",
        lambda loads: loads.num_recomputed_total, True,
    ),
    WorkerMetric("pdrelay_resident_bytes", "Memory of its process.", lambda loads: loads.rss_bytes),
    WorkerMetric(
        "pdrelay_watched_step_seconds", "Of the steps that were timed by stage.", lambda loads: loads.watched_seconds,
        True,
    ),
    WorkerMetric("agent_rx_bytes", "Fetched from other workers.", lambda loads: loads.fetched_bytes_total, True),
    WorkerMetric("agent_rx_requests_num", "Fetches of them.", lambda loads: loads.num_fetches_total, True),
    WorkerMetric("agent_xfer_time", "Microseconds that they took.", lambda loads: loads.fetch_us_total, True),
)
OF_ENGINES = (
    WorkerMetric(
        "vllm:kv_cache_usage_perc", "Share of its blocks that is in use, 0 to 1.",
        lambda loads: 1 - loads.num_blocks_free / loads.num_blocks_total if loads.num_blocks_total else 0.0,
    ),
    WorkerMetric(
        "vllm:num_preemptions", "Sequences moved to its host memory.", lambda loads: loads.num_moves_total, True
    ),
    WorkerMetric(
        "vllm:nixl_num_failed_transfers", "Pulls that ended without success.",
        lambda loads: loads.num_failed_pulls_total, True,
    ),
)


MEMORY_PARTS = (
    "weights", "arena", "arena_resident", "host_cache", "code", "other", "peak_resident", "allocator_reserved",
    "allocator_used", "available",
)


def expert_tokens(links: Sequence[WorkerLink]) -> list[list[int]]:
    """Of all these workers together, a row a layer with experts; none if nobody counts them. A worker that tells of
    another shape than the first is left out."""
    total: list[list[int]] = []
    for link in links:
        rows = [list(row.tokens) for row in link.load.experts]
        if not total:
            total = rows
        elif [len(row) for row in rows] == [len(row) for row in total]:
            total = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(total, rows, strict=True)]
    return total


def busiest_over_mean(links: Sequence[WorkerLink]) -> list[float | None]:
    """By layer with experts, of all these workers together: tokens of the busiest over the mean; None: none yet."""
    return [max(row) * len(row) / sum(row) if any(row) else None for row in expert_tokens(links)]


class WorkerMetrics(Collector):
    """Args:
    model: the served name.
    """

    def __init__(self, registry: Registry, model: str) -> None:
        self._registry = registry
        self._model = model

    def collect(self) -> Iterator[Metric]:
        yield self._workers()
        breakers = GaugeMetricFamily(
            "pdrelay_open_breakers", "1 for a worker to which nothing is sent, as it fails.", labels=["worker", "role"]
        )
        for link in self._registry.links():
            breakers.add_metric([link.worker_id, link.role.value], link.breaker.is_open)
        yield breakers
        for metric in OF_WORKERS:
            yield self._family(metric, ["worker", "role"], lambda worker_id, role: [worker_id, role])
        for metric in OF_ENGINES:
            yield self._family(metric, ["model_name", "engine"], lambda worker_id, _: [self._model, worker_id])
        yield self._stages()
        yield self._memory()
        yield from self._experts()
        index = self._registry.index
        yield GaugeMetricFamily("pdrelay_index_entries", "Cached blocks, each at one worker, known.", index.num_entries)
        yield GaugeMetricFamily("pdrelay_index_left_out", "Cached blocks it had no room for.", index.num_left_out)

    def _workers(self) -> Metric:
        family = GaugeMetricFamily("pdrelay_workers", "Workers by role and state.", labels=["role", "state"])
        counts = Tally((link.role, link.state) for link in self._registry.links())
        for (role, state), count in counts.items():
            family.add_metric([role.value, state.value], count)
        return family

    def _stages(self) -> Metric:
        family = CounterMetricFamily(
            "pdrelay_stage_seconds", "Of watched steps, by stage.", labels=["worker", "role", "stage"]
        )
        for link in self._registry.links():
            for time in link.loads.stages if link.loads is not None else ():
                family.add_metric([link.worker_id, link.role.value, time.stage], time.seconds)
        return family

    def _memory(self) -> Metric:
        family = GaugeMetricFamily(
            "pdrelay_memory_bytes", "Of a worker's process, by what it is for.", labels=["worker", "role", "part"]
        )
        for link in self._registry.links():
            if link.load.memory is not None:
                for part in MEMORY_PARTS:
                    value = getattr(link.load.memory, f"{part}_bytes")
                    family.add_metric([link.worker_id, link.role.value, part], value)
        return family

    def _experts(self) -> Iterator[Metric]:
        """By pool: a series a worker and expert would be too many."""
        tokens = CounterMetricFamily(
            "pdrelay_expert_tokens", "Computed by each expert in watched steps.", labels=["role", "layer", "expert"]
        )
        skew = GaugeMetricFamily(
            "pdrelay_expert_max_over_mean", "Tokens of a layer's busiest expert over the mean.",
            labels=["role", "layer"],
        )
        for role in Role:
            for layer, row in enumerate(expert_tokens(self._registry.links(role))):
                for expert, count in enumerate(row):
                    tokens.add_metric([role.value, str(layer), str(expert)], count)
                if any(row):
                    skew.add_metric([role.value, str(layer)], max(row) * len(row) / sum(row))
        yield tokens
        yield skew

    def _family(self, metric: WorkerMetric, labels: list[str], of: Callable[[str, str], list[str]]) -> Metric:
        family_type = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        family = family_type(metric.name, metric.documentation, labels=labels)
        for link in self._registry.links():
            if link.loads is not None:
                family.add_metric(of(link.worker_id, link.role.value), metric.value(link.loads))
        return family
