"""Sends requests to a cluster in a way that proves something: remote placement, cold caches, checksums reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from pd_engine.contracts import api_pb2
from pd_engine.errors import FailedPrecondition
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import Completion, RouterClient
from pd_ops.request_options import Prompt, to_request

Pair = tuple[str, str]  # ids of a prefill and of a decode worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    prompt: Prompt
    sampling: SamplingFields


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


async def run_remote(
    client: RouterClient, requests: Sequence[Request], pairs: Sequence[Pair], *, concurrency: int,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Completion]:
    """Runs all requests, `concurrency` at a time, over all pairs in turn.

    Args:
        on_done: told how many are done, after each.

    Raises:
        PdRelayError: of the first request that failed.
    """
    turn = asyncio.Semaphore(concurrency)
    num_done = 0

    async def run(number: int, request: Request) -> Completion:
        nonlocal num_done
        placement = cold_placement(pairs[number % len(pairs)])
        async with turn:
            completion = await client.complete(to_request(request.prompt, request.sampling, placement=placement))
        num_done += 1
        on_done(num_done)
        return completion

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(number, request)) for number, request in enumerate(requests)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
