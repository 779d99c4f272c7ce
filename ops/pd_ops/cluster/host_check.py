"""Whether each host has what its processes will need, asked before any of them is started there."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from pd_engine.errors import FailedPrecondition, Unavailable
from pd_ops.cluster.host_facts import HostFacts, difference, host_facts
from pd_ops.cluster.host_room import HostRoom
from pd_ops.cluster.plan import POOL_LABEL, Role

ANSWER_TIMEOUT_S = 60.0  # with the start of a process for it
ray: Any = importlib.import_module("ray")  # Any: it is typed in parts only


async def check_hosts(hosts: Sequence[HostRoom], model: str) -> None:
    """All hosts of a pool, at once.

    Raises:
        FailedPrecondition: a host lacks something, or has something else than the head; all such hosts are named.
        Unavailable: a host does not answer.
    """
    here = host_facts(model)
    pools = {role.value for role in Role}
    asked = [host for host in hosts if host.labels.get(POOL_LABEL) in pools]
    answers = await asyncio.gather(*(_ask(host, model) for host in asked))
    found = [difference(host.address, there, here, model) for host, there in zip(asked, answers, strict=True)]
    if wrong := [sentence for sentence in found if sentence is not None]:
        raise FailedPrecondition("; ".join(wrong))


async def _ask(host: HostRoom, model: str) -> HostFacts:
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(host.node_id, soft=False)
    ask = ray.remote(host_facts).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            facts: HostFacts = await ask.remote(model)
    except TimeoutError:
        raise Unavailable(f"{host.address} did not say in {ANSWER_TIMEOUT_S:g} s what it has") from None
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise FailedPrecondition(f"{host.address} cannot say what it has, pd-relay may be missing: {reason}") from None
    return facts
