"""Sends requests to a cluster in a way that proves something: placed on named workers, so that a prompt is handed over,
or computed at the decode worker; with cold caches or warm ones; checksums reported."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from pd_engine.contracts import api_pb2
from pd_engine.errors import FailedPrecondition
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import Completion, RouterClient
from pd_ops.request_options import Prompt, to_request

Pair = tuple[str, str]  # ids of a prefill and of a decode worker
LOCAL_EVERY = 3  # not as the modes of the cases: each meets both


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Attributes:
    emitted: the first tokens of the answer, which the client has from elsewhere; None: it has not asked before.
    """

    prompt: Prompt
    sampling: SamplingFields
    cache_salt: str = ""
    emitted: tuple[int, ...] | None = None


def worker_pairs(info: api_pb2.GetServerInfoResponse) -> list[Pair]:
    """Every pair of a ready prefill worker and a ready decode worker.

    Raises:
        FailedPrecondition: there is none.
    """
    ready = {
        role: [worker.id for worker in info.workers if worker.role == role and worker.state == "ready"]
        for role in ("prefill", "decode")
    }
    pairs = list(product(ready["prefill"], ready["decode"]))
    if not pairs:
        raise FailedPrecondition("the cluster needs a ready prefill worker and a ready decode worker")
    return pairs


def cold_placement(pair: Pair) -> api_pb2.Placement:
    """On that pair, with nothing cached, and the checksums of what was handed over in the answer."""
    prefill_worker, decode_worker = pair
    return api_pb2.Placement(
        prefill_worker=prefill_worker, decode_worker=decode_worker, bypass_prefix_cache=True,
        report_block_checksums=True,
    )


def cold_placements(pairs: Sequence[Pair], count: int) -> list[api_pb2.Placement]:
    """`count` of them, over all pairs in turn."""
    return [cold_placement(pairs[number % len(pairs)]) for number in range(count)]


def verified_placements(pairs: Sequence[Pair], count: int) -> list[api_pb2.Placement]:
    """Cold ones; of every `LOCAL_EVERY` one is on the decode worker alone, which is to compute the prompt itself."""
    placements = cold_placements(pairs, count)
    for placement in placements[LOCAL_EVERY - 1 :: LOCAL_EVERY]:
        placement.prefill_worker = placement.decode_worker
    return placements


def is_local(placement: api_pb2.Placement) -> bool:
    return placement.prefill_worker == placement.decode_worker


def warm_placement(cold: api_pb2.Placement) -> api_pb2.Placement:
    """On the same pair, with what its caches have."""
    warm = api_pb2.Placement()
    warm.CopyFrom(cold)
    warm.bypass_prefix_cache = False
    return warm


def _message(request: Request, placement: api_pb2.Placement) -> api_pb2.GenerateRequest:
    message = to_request(request.prompt, request.sampling, placement=placement, cache_salt=request.cache_salt)
    if request.emitted is not None:
        message.request_id = f"verify-{uuid.uuid4().hex}"  # that no router knows: it goes on, it does not look up
        message.resume_output_ids.add(ids=request.emitted)
    return message


async def run_remote(
    client: RouterClient, requests: Sequence[Request], placements: Sequence[api_pb2.Placement], *, concurrency: int,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Completion]:
    """Runs all requests, `concurrency` at a time.

    Args:
        placements: one a request.
        on_done: told how many are done, after each.

    Raises:
        PdRelayError: of the first request that failed.
    """
    turn = asyncio.Semaphore(concurrency)
    num_done = 0

    async def run(request: Request, placement: api_pb2.Placement) -> Completion:
        nonlocal num_done
        async with turn:
            completion = await client.complete(_message(request, placement))
        num_done += 1
        on_done(num_done)
        return completion

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(*job)) for job in zip(requests, placements, strict=True)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
