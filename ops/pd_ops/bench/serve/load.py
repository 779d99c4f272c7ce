"""Which requests a run sends, and when: from a trace or built-in kinds, scaled to the machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.arrivals import renewal
from pd_ops.bench.serve.kinds import draw
from pd_ops.bench.serve.traced import TracedRequest, fitting_scale, scale_lengths, scale_rate
from pd_ops.bench.serve.traces import read_trace
from pd_ops.output import Document


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What was asked for.

    Attributes:
        kinds: built-in ones, if there is no trace.
        rate_per_s: None: the trace's own; of kinds one request a second.
        variation: coefficient of variation of the gaps between arrivals; None: the trace's arrivals, Poisson for kinds.
        concurrency: of a closed loop; None: open loop.
        length_scale: None: what fits the context.
    """

    trace: Path | None = None
    trace_format: str | None = None
    skip: int = 0
    kinds: Sequence[str] = ()
    num_requests: int
    rate_per_s: float | None = None
    variation: float | None = None
    concurrency: int | None = None
    length_scale: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sent, and how it is described in the result."""

    requests: tuple[TracedRequest, ...]
    description: Document


def build_load(plan: LoadPlan, max_context: int) -> Load:
    """Raises:
    InvalidArgument: both a trace and kinds, an unknown kind, or a broken trace.
    NotFound: there is no such trace.
    """
    if plan.trace is not None and plan.kinds:
        raise InvalidArgument("give --trace or --kind, not both")
    if plan.trace is None and (plan.skip or plan.trace_format is not None):
        raise InvalidArgument("--skip and --trace-format are of a --trace, and there is none")
    if plan.concurrency is not None and (plan.rate_per_s is not None or plan.variation is not None):
        raise InvalidArgument("--concurrency is a closed loop, which has no --rate and no --burstiness")
    requests = _requests(plan)
    if plan.variation is not None and plan.trace is not None:
        requests = _at(requests, plan, _rate(requests) or 1.0)
    elif plan.trace is not None and plan.rate_per_s is not None:
        requests = list(scale_rate(requests, plan.rate_per_s))
    scale = plan.length_scale if plan.length_scale is not None else fitting_scale(requests, max_context)
    clipped = scale_lengths(requests, scale, max_context)
    return Load(requests=clipped.requests, description=_description(plan, clipped.requests, scale, clipped.num_clipped))


def _requests(plan: LoadPlan) -> list[TracedRequest]:
    if plan.trace is not None:
        return read_trace(plan.trace, plan.trace_format, most=plan.num_requests, skip=plan.skip, seed=plan.seed)
    rng = random.Random(f"arrivals/{plan.seed}")
    times = renewal(plan.rate_per_s or 1.0, 1.0 if plan.variation is None else plan.variation, rng)
    arrivals = list(itertools.islice(times, plan.num_requests))
    first = arrivals[0] if arrivals else 0.0
    return draw(plan.kinds or ("short",), [at - first for at in arrivals], plan.seed)


def _at(requests: Sequence[TracedRequest], plan: LoadPlan, own_rate: float) -> list[TracedRequest]:
    """The trace's requests, at arrivals of their own."""
    assert plan.variation is not None
    times = renewal(plan.rate_per_s or own_rate, plan.variation, random.Random(f"arrivals/{plan.seed}"))
    first = next(times)
    arrivals = itertools.chain([0.0], (at - first for at in times))
    return [replace(request, arrival_s=at) for request, at in zip(requests, arrivals, strict=False)]


def _rate(requests: Sequence[TracedRequest]) -> float | None:
    """None: one request, or all at one moment."""
    span = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span if span > 0 else None


def _description(plan: LoadPlan, requests: Sequence[TracedRequest], scale: float, num_clipped: int) -> Document:
    blocks = [block for request in requests for block in request.prefix]
    closed = plan.concurrency is not None
    return {
        "source": "kinds" if plan.trace is None else "trace",
        "trace": None if plan.trace is None else plan.trace.name,
        "kinds": list(plan.kinds or ("short",)) if plan.trace is None else None, "skip": plan.skip,
        "requests": len(requests), "seed": plan.seed,
        "loop": "closed" if closed else "open", "concurrency": plan.concurrency,
        "arrivals": None if closed else _arrivals(plan), "rate_per_s": None if closed else _rate(requests),
        "length_scale": scale, "num_clipped": num_clipped,
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
        "shared_block_share": 1 - len(set(blocks)) / len(blocks) if blocks else 0.0,
    }


def _arrivals(plan: LoadPlan) -> str:
    if plan.variation is None:
        return "poisson" if plan.trace is None else "the trace's" + ("" if plan.rate_per_s is None else ", rescaled")
    return "poisson" if plan.variation == 1 else f"gamma, variation {plan.variation:g}"
