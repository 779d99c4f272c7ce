"""One verification run: the cases through a cluster, first over cold caches, then some that begin like these over what
they have left, handed over or computed at the decode worker; then all of them in this process, and compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_engine.contracts import api_pb2
from pd_engine.errors import FailedPrecondition
from pd_engine.settings import Settings
from pd_ops.client import Completion, RouterClient, router_client
from pd_ops.monolithic import Monolithic, Questions
from pd_ops.verification.cases import Case, CaseLimits, make_cases
from pd_ops.verification.oracle import expected_outcome
from pd_ops.verification.outcome import first_difference, outcome_of
from pd_ops.verification.remote import (
    Request,
    is_local,
    run_remote,
    verified_placements,
    warm_placement,
    worker_pairs,
)
from pd_ops.verification.report import CheckedCase, Report
from pd_ops.verification.warm import FinishedCase, warm_cases

PROGRESS_EVERY = 10

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationPlan:
    """`count` requests over cold caches, then `num_warm` over warm ones."""

    count: int
    num_warm: int
    seed: int
    concurrency: int


async def verify(address: str, settings: Settings, plan: VerificationPlan, note: Note) -> Report:
    """Compares the cluster behind the router at `address` with this process.

    Args:
        settings: with which this process loads its model: those of the cluster.

    Raises:
        FailedPrecondition: the cluster serves another model, dtype or build, or has no pair of workers.
        PdRelayError: a request failed.
    """
    began = time.monotonic()
    async with router_client(address) as client:
        info, pairs = await client.model_info(), worker_pairs(await client.server_info())
        oracle = await asyncio.to_thread(load_oracle, settings, info)
        has_drafts = info.num_draft_layers > 0
        limits = CaseLimits(
            vocab_size=info.vocab_size, max_context_length=info.max_context_length, block_size=info.block_size,
            chunk_tokens=settings.engine.chunk_tokens,
            max_speculate=settings.decode.speculate if has_drafts else 0,
        )
        cases = make_cases(plan.count, plan.seed, limits)
        placements = verified_placements(pairs, len(cases))
        note(f"{plan.count} requests through {len(pairs)} pairs of workers, {plan.concurrency} at a time")
        completions = await _run(client, cases, placements, plan, _progress(note, "cluster", plan.count))
        finished = [_finished(oracle, case, done) for case, done in zip(cases, completions, strict=True)]
        warm = warm_cases(finished, plan.num_warm, plan.seed, limits)
        places = [warm_placement(placements[case.follows]) for case in warm if case.follows is not None]
        note(f"{plan.num_warm} that begin like these, over what is cached")
        completions += await _run(client, warm, places, plan, _progress(note, "warm", plan.num_warm))
        cases += warm
        placements += places
    note("the same in this process")
    progress = _progress(note, "one process", len(cases))
    checked = []
    for number, (case, completion, place) in enumerate(zip(cases, completions, placements, strict=True), start=1):
        expected = await asyncio.to_thread(expected_outcome, oracle, _request(case))
        got = outcome_of(completion.complete)
        difference = first_difference(
            expected, got, bytes_per_token=info.bytes_per_token,
            shared_block_tokens=info.block_size if case.is_warm else None, is_local=is_local(place),
        )
        checked.append(CheckedCase(case=case, expected=expected, got=got, difference=difference))
        progress(number)
    return Report(
        model=info.model_path, fingerprint=info.fingerprint, cluster=address, bytes_per_token=info.bytes_per_token,
        seconds=time.monotonic() - began, checked=tuple(checked),
    )


def load_oracle(settings: Settings, info: api_pb2.GetModelInfoResponse) -> Monolithic:
    """The model in this process, if it is what the cluster serves.

    Raises:
        FailedPrecondition: the fingerprints differ.
    """
    oracle = Monolithic.load(settings, Questions.load(settings))
    if oracle.engine.fingerprint != info.fingerprint:
        raise FailedPrecondition(
            f"the cluster serves {info.model_path} ({info.dtype}, fingerprint {info.fingerprint}), this process "
            f"{settings.model} ({oracle.engine.dtype}, fingerprint {oracle.engine.fingerprint}): give the same "
            f"--model, --dtype, --ops, --speculate and --config"
        )
    return oracle


async def _run(
    client: RouterClient, cases: Sequence[Case], placements: Sequence[api_pb2.Placement], plan: VerificationPlan,
    on_done: Callable[[int], None],
) -> list[Completion]:
    return await run_remote(
        client, [_request(case) for case in cases], placements, concurrency=plan.concurrency, on_done=on_done
    )


def _finished(oracle: Monolithic, case: Case, completion: Completion) -> FinishedCase:
    question = oracle.questions.ask(case.prompt, case.sampling, request_id="")
    return FinishedCase(
        number=case.number, prompt_ids=question.prompt_ids, token_ids=tuple(completion.complete.output_ids)
    )


def _request(case: Case) -> Request:
    return Request(prompt=case.prompt, sampling=case.sampling)


def _progress(note: Note, where: str, total: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        if done % PROGRESS_EVERY == 0 or done == total:
            note(f"  {where}: {done} of {total}")

    return tell
