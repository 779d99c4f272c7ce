"""A trace that is replayed while a drill breaks something: what is asked, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pd_engine.contracts import api_pb2
from pd_engine.text.defaults import SamplingFields
from pd_ops.bench.serve.load import LoadPlan, build_load
from pd_ops.bench.serve.prompts import PromptMaker
from pd_ops.drills.traffic import Schedule
from pd_ops.request_options import TokensPrompt
from pd_ops.verification.remote import Request

MAX_REQUESTS = 1_000  # of the trace: then it begins anew, with prompts that caches may still have
TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Attributes:
    name: of the trace's file.
    """

    name: str
    requests: tuple[Request, ...]
    schedule: Schedule

    @property
    def rate_per_s(self) -> float:
        return len(self.requests) / self.schedule.period_s


def read_replay(
    trace: Path, model: api_pb2.GetModelInfoResponse, *, rate_per_s: float | None = None,
    length_scale: float | None = None,
) -> Replay:
    """As `pd-relay bench serve` reads it.

    Args:
        rate_per_s: requests a second; None: the trace's own.
        length_scale: of prompts and answers; None: what fits the model's context.

    Raises:
        InvalidArgument, NotFound: it is no trace.
    """
    plan = LoadPlan(trace=trace, num_requests=MAX_REQUESTS, rate_per_s=rate_per_s, length_scale=length_scale)
    traced = build_load(plan, model.max_context_length).requests
    prompts = PromptMaker(vocab_size=model.vocab_size, salt=trace.name)
    last_s = traced[-1].arrival_s
    return Replay(
        name=trace.name,
        requests=tuple(
            Request(
                prompt=TokensPrompt(token_ids=tuple(prompts.token_ids(one, number))),
                sampling=SamplingFields(
                    temperature=TEMPERATURE, seed=number, max_tokens=one.output_tokens, ignore_eos=True, logprobs=0
                ),
            )
            for number, one in enumerate(traced)
        ),
        schedule=Schedule(
            due_s=tuple(one.arrival_s for one in traced),
            period_s=last_s * len(traced) / (len(traced) - 1) if last_s > 0 else len(traced) / (rate_per_s or 1.0),
        ),
    )
