"""Whether each host has what its processes will need, asked before any of them is started there."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from pd_engine.errors import FailedPrecondition, Unavailable
from pd_engine.model.checkpoint import weight_files
from pd_engine.model.config import CONFIG_FILE
from pd_kernels.build import source_digest
from pd_ops.cluster.host_room import HostRoom
from pd_ops.cluster.plan import POOL_LABEL, Role

ANSWER_TIMEOUT_S = 60.0  # with the start of a process for it
ray: Any = importlib.import_module("ray")  # Any: it is typed in parts only


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """`ops`: a digest of the sources of the ops; `checkpoint`: one of its configuration, and of names and sizes of its
    weights; empty if it is not there."""

    version: str
    ops: str
    checkpoint: str


def host_facts(model: str) -> HostFacts:
    """Of the host that this runs on."""
    return HostFacts(version=version("pd-relay"), ops=source_digest(), checkpoint=checkpoint_digest(Path(model)))


def checkpoint_digest(path: Path) -> str:
    try:
        config = (path / CONFIG_FILE).read_bytes()
        sizes = [(file.name, file.stat().st_size) for file in weight_files(path)]
    except OSError:
        return ""
    return hashlib.sha256(config + repr(sizes).encode()).hexdigest()


def difference(host: str, there: HostFacts, here: HostFacts, model: str) -> str | None:
    """What is wrong with a host, seen from the head: a sentence that names it."""
    if there.version != here.version:
        return f"{host} has pd-relay {there.version}, the head {here.version}"
    if there.ops != here.ops:
        return f"{host} has ops of other sources than the head, under the same version"
    if not there.checkpoint:
        return f"{host} has no checkpoint in {model}"
    if there.checkpoint != here.checkpoint:
        return f"{host} has another checkpoint in {model} than the head"
    return None


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
