"""One request of a trace, whatever the trace's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pd_engine.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRequest:
    """Attributes:
    arrival_s: after the trace's beginning.
    prefix: ids of the prompt's blocks of `block_tokens` tokens, the last one perhaps shorter. Two prompts that begin
        with the same ids begin with the same tokens. Empty: it shares nothing.
    kind: what sort of request it is, for the table.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    block_tokens: int = 512
    kind: str = "trace"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clipped:
    """`num_clipped`: requests that are shorter than the trace's, by more than the scale."""

    requests: tuple[TracedRequest, ...]
    num_clipped: int


def scale_lengths(requests: Sequence[TracedRequest], scale: float, max_context: int) -> Clipped:
    """Prompts, answers and blocks times `scale`, at least one token each. Blocks scale with prompts, so that what was
    shared stays shared. What would not fit the context loses the end of its prompt, then of its answer."""
    scaled, num_clipped = [], 0
    for request in requests:
        output = min(max(1, round(request.output_tokens * scale)), max(1, max_context - 1))
        prompt = max(1, round(request.prompt_tokens * scale))
        if prompt + output > max_context:
            num_clipped += 1
            prompt = max(1, max_context - output)
        scaled.append(replace(
            request, prompt_tokens=prompt, output_tokens=output,
            block_tokens=max(1, round(request.block_tokens * scale)),
        ))
    return Clipped(requests=tuple(scaled), num_clipped=num_clipped)


def fitting_scale(requests: Sequence[TracedRequest], max_context: int) -> float:
    """The largest scale up to 1 at which 99 of 100 requests fit the context."""
    totals = sorted(request.prompt_tokens + request.output_tokens for request in requests)
    if not totals:
        return 1.0
    return min(1.0, max_context / max(1, totals[min(len(totals) - 1, int(0.99 * len(totals)))]))


def scale_rate(requests: Sequence[TracedRequest], per_s: float) -> tuple[TracedRequest, ...]:
    """The same arrivals faster or slower, so that their mean rate is `per_s`; their pattern stays.

    Raises:
        InvalidArgument: several arrive, and all at one moment.
    """
    if len(requests) < 2:
        return tuple(replace(request, arrival_s=0.0) for request in requests)
    first = requests[0].arrival_s
    span = requests[-1].arrival_s - first
    if span <= 0:
        raise InvalidArgument(f"all {len(requests)} requests of the trace arrive at one moment, which no rate scales: "
                              "give --burstiness too, for arrivals of their own (1: Poisson)")
    factor = (len(requests) - 1) / per_s / span
    return tuple(replace(request, arrival_s=(request.arrival_s - first) * factor) for request in requests)
