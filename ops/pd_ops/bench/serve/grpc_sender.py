"""Requests over pd-relay's gRPC door."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_engine.contracts import api_pb2
from pd_engine.errors import Unavailable
from pd_ops.bench.serve.record import Recording
from pd_ops.bench.serve.sender import Sampling
from pd_ops.client import RouterClient


class GrpcSender:
    def __init__(self, client: RouterClient, sampling: Sampling) -> None:
        self._client = client
        self._sampling = sampling

    async def send(self, token_ids: Sequence[int], recording: Recording, now: Callable[[], float]) -> None:
        complete = None
        async for response in self._client.stream(self._request(token_ids, recording)):
            if response.HasField("chunk"):
                recording.arrivals.append((now(), len(response.chunk.token_ids)))
            elif response.HasField("complete"):
                complete = response.complete
        if complete is None:
            raise Unavailable("the stream ended without a result")
        recording.details |= _details(complete)

    def _request(self, token_ids: Sequence[int], recording: Recording) -> api_pb2.GenerateRequest:
        sampling = self._sampling
        return api_pb2.GenerateRequest(
            tokenized=api_pb2.TokenizedInput(input_ids=token_ids), stream=True,
            placement=api_pb2.Placement(report_placement=True),
            sampling_params=api_pb2.SamplingParams(
                temperature=sampling.temperature, max_tokens=recording.asked_tokens, ignore_eos=True,
                seed=sampling.seed + recording.number, speculate=sampling.speculate,
            ),
        )


def _details(complete: api_pb2.GenerateComplete) -> dict[str, object]:
    details: dict[str, object] = {
        "num_cached_tokens": complete.usage.cached_tokens, "num_told_tokens": complete.usage.completion_tokens,
        "num_drafted": complete.drafted_tokens, "num_accepted": complete.accepted_tokens,
        "finish_reason": complete.finish_reason, "queue_ms": _queue_ms(complete.placement),
    }
    if complete.HasField("handoff"):
        details |= {"handoff_bytes": complete.handoff.bytes, "hidden_bytes": complete.handoff.hidden_bytes}
    return details


def _queue_ms(report: api_pb2.PlacementReport) -> float | None:
    """What the router expected the prompt to wait at the worker that it chose."""
    for candidate in report.candidates:
        if candidate.chosen and candidate.part in ("prefill", "local"):
            return sum(term.ms for term in candidate.terms if term.name == "queue")
    return None
