"""One verification run: the cases through a cluster, handed over or computed at the decode worker; first over cold
caches, then some that begin like these over what they have left, answers resumed from every index, every split of a
prompt between cached and new, and more at once than the room; then all of them in this process, and compared."""

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
from pd_ops.verification.cases import Case, CaseLimits, Phase, make_cases
from pd_ops.verification.oracle import expected_outcome
from pd_ops.verification.outcome import answer_difference, first_difference, outcome_of
from pd_ops.verification.pressed import pressed_cases
from pd_ops.verification.remote import (
    Pair,
    Request,
    cold_placement,
    is_local,
    run_remote,
    verified_placements,
    warm_placement,
    worker_pairs,
)
from pd_ops.verification.report import CheckedCase, Report
from pd_ops.verification.resumed import resumed_cases
from pd_ops.verification.splits import split_cases
from pd_ops.verification.warm import FinishedCase, warm_cases

PROGRESS_EVERY = 10

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationPlan:
    """How many requests of each phase.

    Attributes:
        count: over cold caches, `concurrency` at a time.
        num_warm: then over warm ones.
        num_resumed: answers that are resumed from every index.
        num_splits: prompts of which every split between cached and new is run.
        presses: whether the room of a decode worker is outgrown, if it is small enough.
    """

    count: int
    num_warm: int
    num_resumed: int
    num_splits: int
    presses: bool
    seed: int
    concurrency: int


class _Asked:
    """What the cluster has been asked and has answered; a case's number is its place in each list."""

    def __init__(self, client: RouterClient, note: Note) -> None:
        self.cases: list[Case] = []
        self.placements: list[api_pb2.Placement] = []
        self.completions: list[Completion] = []
        self._client = client
        self._note = note

    async def ask(
        self, name: str, cases: Sequence[Case], placements: Sequence[api_pb2.Placement], concurrency: int
    ) -> None:
        self.completions += await run_remote(
            self._client, [_request(case) for case in cases], placements, concurrency=concurrency,
            on_done=_progress(self._note, name, len(cases)),
        )
        self.cases += cases
        self.placements += placements

    async def ask_followers(self, name: str, cases: Sequence[Case], concurrency: int) -> None:
        """On the workers of those that they follow."""
        places = [warm_placement(self.placements[case.follows]) for case in cases if case.follows is not None]
        await self.ask(name, cases, places, concurrency)

    def finished(self, oracle: Monolithic) -> list[FinishedCase]:
        return [_finished(oracle, *pair) for pair in zip(self.cases, self.completions, strict=True)]


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
        asked = _Asked(client, note)
        note(f"{plan.count} requests through {len(pairs)} pairs of workers, {plan.concurrency} at a time")
        cases = make_cases(plan.count, plan.seed, limits)
        await asked.ask("cluster", cases, verified_placements(pairs, len(cases)), plan.concurrency)
        finished = asked.finished(oracle)
        note(f"{plan.num_warm} that begin like these, over what is cached")
        warm = warm_cases(finished, plan.num_warm, plan.seed, limits)
        await asked.ask_followers("warm", warm, plan.concurrency)
        resumed = resumed_cases(cases, finished, plan.num_resumed, len(asked.cases))
        note(f"{plan.num_resumed} answers resumed from {len(resumed)} indices")
        await asked.ask_followers("resumed", resumed, plan.concurrency)
        await _ask_splits(asked, pairs, plan, limits, note)
        num_moves = await _ask_pressed(asked, client, pairs[0], plan, limits, note) if plan.presses else None
    note("the same in this process")
    progress = _progress(note, "one process", len(asked.cases))
    checked = []
    for case, completion, place in zip(asked.cases, asked.completions, asked.placements, strict=True):
        expected = await asyncio.to_thread(expected_outcome, oracle, _request(case))
        got = outcome_of(completion.complete)
        if case.phase is Phase.RESUMED:  # what is handed over holds emitted tokens too
            difference = answer_difference(expected, got)
        else:
            difference = first_difference(
                expected, got, bytes_per_token=info.bytes_per_token,
                shared_block_tokens=None if case.phase is Phase.COLD else info.block_size, is_local=is_local(place),
            )
        checked.append(CheckedCase(case=case, expected=expected, got=got, difference=difference))
        progress(len(checked))
    return Report(
        model=info.model_path, fingerprint=info.fingerprint, cluster=address, bytes_per_token=info.bytes_per_token,
        seconds=time.monotonic() - began, num_moves=num_moves, checked=tuple(checked),
    )


async def _ask_splits(
    asked: _Asked, pairs: Sequence[Pair], plan: VerificationPlan, limits: CaseLimits, note: Note
) -> None:
    leading, following = split_cases(plan.num_splits, len(asked.cases), plan.seed, limits)
    if leading:
        note(f"{len(following)} splits of {plan.num_splits} prompts between cached and new")
        places = [warm_placement(place) for place in verified_placements(pairs, len(leading))]
        await asked.ask("beginnings", leading, places, plan.concurrency)
        await asked.ask_followers("whole prompts", following, plan.concurrency)


async def _ask_pressed(
    asked: _Asked, client: RouterClient, pair: Pair, plan: VerificationPlan, limits: CaseLimits, note: Note
) -> int | None:
    """Returns how often a sequence has left for host memory; None: nothing was asked, the room is too large."""
    before = await _load(client, pair[1])
    num_room_tokens = before.num_blocks_total * limits.block_size
    cases = pressed_cases(num_room_tokens, len(asked.cases), plan.seed, limits)
    if not cases:
        note(f"{pair[1]} has room for {num_room_tokens} tokens: too many to outgrow here, no sequence is moved")
        return None
    note(f"{len(cases)} at once that outgrow the room of {pair[1]}")
    await asked.ask("pressed", cases, [warm_placement(cold_placement(pair))] * len(cases), len(cases))
    return (await _load(client, pair[1])).num_moves_total - before.num_moves_total


async def _load(client: RouterClient, worker_id: str) -> api_pb2.WorkerStatus:
    [worker] = [worker for worker in (await client.server_info()).workers if worker.id == worker_id]
    return worker


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


def _finished(oracle: Monolithic, case: Case, completion: Completion) -> FinishedCase:
    question = oracle.questions.ask(case.prompt, case.sampling, request_id="")
    return FinishedCase(
        number=case.number, prompt_ids=question.prompt_ids, token_ids=tuple(completion.complete.output_ids)
    )


def _request(case: Case) -> Request:
    return Request(
        prompt=case.prompt, sampling=case.sampling, cache_salt=case.cache_salt, emitted=case.emitted,
    )


def _progress(note: Note, where: str, total: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        if done % PROGRESS_EVERY == 0 or done == total:
            note(f"  {where}: {done} of {total}")

    return tell
