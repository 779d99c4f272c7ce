"""What a router counts of requests. Names that people know from vLLM mean here what they mean there; a request's
choices count one by one, as its sequences do there. Decision 0187 lists where that is not quite so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from pd_router.journey import HandoffReport, Journey, JourneyState
from pd_router.own_stages import OwnStages
from pd_router.tally import TallyCounter, TallyHistogram
from pd_router.timeline import AttemptTimes, Timeline

LONG_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)
ITL_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
)
TRANSFER_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
BYTES = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
ACCEPTANCE = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0)
_FINISHED = {
    JourneyState.STOPPED: "stop", JourneyState.LENGTH: "length", JourneyState.CANCELLED: "abort",
    JourneyState.FAILED: "error",
}
MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


class RequestMetrics:
    """Attributes:
    own_stages: what the router itself does.
    num_drafted, num_accepted: draft tokens, of choices that have ended.
    num_handoffs, num_handoff_bytes: completed and verified, of choices that have ended.

    Args:
        model: the served name, a label of all.
    """

    def __init__(
        self, collectors: CollectorRegistry, model: str, num_running: Callable[[], int], num_waiting: Callable[[], int]
    ) -> None:
        self._collectors = collectors
        self._model = model
        self.own_stages = OwnStages()
        self.num_drafted = self.num_accepted = self.num_handoffs = self.num_handoff_bytes = 0
        collectors.register(self.own_stages)
        running = self._of_model(Gauge, "vllm:num_requests_running", "Choices on workers.")
        running.set_function(lambda: num_running() - num_waiting())
        self._of_model(Gauge, "vllm:num_requests_waiting", "In line for a worker.").set_function(num_waiting)
        self._success = self._counter("vllm:request_success", "Ended after they had begun.", ["finished_reason"])
        self._prompt_tokens = self._of_model(Counter, "vllm:prompt_tokens", "Of prompts whose first token came.")
        self._tokens = TallyCounter("vllm:generation_tokens", "Generated.", {"model_name": model})
        collectors.register(self._tokens)
        self._queries = self._of_model(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in caches.")
        self._hits = self._of_model(Counter, "vllm:prefix_cache_hits", "Of them, not computed.")
        self._drafted = self._of_model(Counter, "vllm:spec_decode_num_draft_tokens", "Drafted and verified.")
        self._accepted = self._of_model(Counter, "vllm:spec_decode_num_accepted_tokens", "Of them, accepted.")
        self._itl = TallyHistogram(
            "vllm:inter_token_latency_seconds", "Between two steps of a choice that brought tokens.",
            {"model_name": model}, ITL_S,
        )
        collectors.register(self._itl)
        self._init_times()
        self._init_own()

    def _init_times(self) -> None:
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From admission to the first token.", TTFT_S)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From admission to the end.", LONG_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "In line, before the first placement.", LONG_S)
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "From the first placement to the first token.", LONG_S
        )
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From the first to the last token.", LONG_S)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "From placement to the end.", LONG_S)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Of a choice, on average, after its first token.", ITL_S
        )
        self._prompt_size = self._histogram("vllm:request_prompt_tokens", "Of a choice's prompt.", TOKENS)
        self._output_size = self._histogram("vllm:request_generation_tokens", "Generated for a choice.", TOKENS)
        self._transfer_s = self._histogram(
            "vllm:nixl_xfer_time_seconds", "From the beginning of a handoff's pull to its commit.", TRANSFER_S,
            ["transport"],
        )
        self._transfer_bytes = self._histogram(
            "vllm:nixl_bytes_transferred", "Moved by a handoff.", BYTES, ["transport"]
        )

    def _init_own(self) -> None:
        self._ends = self._counter("pdrelay_requests", "Choices by their terminal state.", ["end"])
        self._errors = self._counter("pdrelay_request_errors", "Choices that ended with an error.", ["code"])
        self._retries = self._of_model(Counter, "pdrelay_retries", "Attempts after the first of a choice.")
        self._migrations = self._of_model(
            Counter, "pdrelay_migrations", "Of these, those of a choice whose client had tokens already."
        )
        self._placements = self._counter(
            "pdrelay_placements", "Attempts, by who computes the prompt and why.", ["kind", "reason"]
        )
        self._handoffs = self._counter("pdrelay_handoffs", "Completed and verified.", ["transport"])
        self._handoff_bytes = self._counter("pdrelay_handoff_bytes", "Moved by them.", ["transport"])
        self._hidden_bytes = self._of_model(
            Counter, "pdrelay_handoff_hidden_bytes", "Of these, moved while the prompt was still being computed."
        )
        self._local = self._of_model(Counter, "pdrelay_local_prefills", "Prompts that decode workers have computed.")
        self._acceptance = self._histogram(
            "pdrelay_acceptance_length", "Tokens a decode step of a choice that drafted, on average.", ACCEPTANCE
        )

    def note_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """Of a choice, so long after those before."""
        self._tokens.total += num_tokens
        if gap_s is not None:
            self._itl.observe(gap_s)

    def note_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        self._ttft.observe(seconds)
        self._prompt_tokens.inc(num_prompt_tokens)

    def _note_attempt(self, attempt: AttemptTimes) -> None:
        self._placements.labels(self._model, attempt.kind, attempt.reason).inc()
        if attempt.number > 1:
            self._retries.inc()
            self._migrations.inc(attempt.num_tokens_before > 0)

    def _note_handoff(self, report: HandoffReport) -> None:
        self.num_handoffs += 1
        self.num_handoff_bytes += report.num_bytes
        self._handoffs.labels(self._model, report.transport).inc()
        self._handoff_bytes.labels(self._model, report.transport).inc(report.num_bytes)
        self._hidden_bytes.inc(report.num_hidden_bytes)
        self._transfer_bytes.labels(self._model, report.transport).observe(report.num_bytes)
        self._transfer_s.labels(self._model, report.transport).observe(report.pull_s)

    def note_end(self, journey: Journey, timeline: Timeline, *, num_prompt_tokens: int) -> None:
        assert timeline.ended_s is not None, "it goes on"
        num_tokens = len(journey.stream.tokens) - journey.stream.num_replayed
        self._ends.labels(self._model, journey.state.value).inc()
        if journey.error is not None:
            self._errors.labels(self._model, journey.error.code.value).inc()
        if (finished := _FINISHED.get(journey.state)) is not None:
            self._success.labels(self._model, finished).inc()
        if journey.num_cached_tokens is not None:
            self._queries.inc(num_prompt_tokens)
            self._hits.inc(journey.num_cached_tokens)
        self.num_drafted += journey.num_drafted
        self.num_accepted += journey.num_accepted
        self._drafted.inc(journey.num_drafted)
        self._accepted.inc(journey.num_accepted)
        self._local.inc(journey.local_prefill is not None)
        for attempt in timeline.attempts:
            self._note_attempt(attempt)
        if journey.handoff is not None:
            self._note_handoff(journey.handoff)
        if journey.num_drafted and num_tokens > 1 + journey.num_accepted:
            self._acceptance.observe((num_tokens - 1) / (num_tokens - 1 - journey.num_accepted))
        self._note_times(timeline, timeline.ended_s, num_tokens, num_prompt_tokens)

    def _note_times(self, timeline: Timeline, ended_s: float, num_tokens: int, num_prompt_tokens: int) -> None:
        self._e2e.observe(ended_s - timeline.begun_s)
        self._prompt_size.observe(num_prompt_tokens)
        self._output_size.observe(num_tokens)
        if timeline.queue_s is not None:
            self._queue.observe(timeline.queue_s)
            self._inference.observe(ended_s - timeline.attempts[0].placed_s)
        if timeline.prefill_s is not None and timeline.decode_s is not None:
            self._prefill.observe(timeline.prefill_s)
            self._decode.observe(timeline.decode_s)
            if num_tokens > 1:
                self._per_token.observe(timeline.decode_s / (num_tokens - 1))

    def _of_model(self, kind: type[MetricT], name: str, documentation: str) -> MetricT:
        metric = kind(name, documentation, ["model_name"], registry=self._collectors)
        return metric.labels(self._model)

    def _counter(self, name: str, documentation: str, labels: list[str]) -> Counter:
        return Counter(name, documentation, ["model_name", *labels], registry=self._collectors)

    def _histogram(
        self, name: str, documentation: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        names = ["model_name", *(labels or [])]
        metric = Histogram(name, documentation, names, buckets=buckets, registry=self._collectors)
        return metric if labels else metric.labels(self._model)
