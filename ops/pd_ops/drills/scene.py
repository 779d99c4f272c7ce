"""What a drill may do: find a target, break it, ask the controller, send more requests."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pd_engine.contracts import api_pb2
from pd_engine.errors import FailedPrecondition, Unavailable
from pd_engine.settings import Settings
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import router_client
from pd_ops.cluster.control_messages import Request as ControlRequest
from pd_ops.drills.access import Access
from pd_ops.drills.traffic import Traffic
from pd_ops.request_options import TokensPrompt
from pd_ops.verification.cases import CaseLimits, make_cases
from pd_ops.verification.remote import Request

LONGEST_ANSWER_TOKENS = 128
RETRY_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """What was done.

    Attributes:
        at_s: when.
        target: the worker, or None: the router or no process in particular.
        epoch: of the target's life; empty if there is none.
        is_over_s: when the cluster was left to itself again.
        also: other workers that were hit with the target.
        mend: makes whole what the cluster could do without, once it has recovered; whether it could.
        details: sentences for the report.
    """

    at_s: float
    target: str | None = None
    epoch: str = ""
    is_over_s: float
    also: tuple[str, ...] = ()
    mend: Callable[[], Awaitable[bool]] | None = None
    details: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Scene:
    """A cluster under traffic.

    Attributes:
        model: as its router describes it.
        target: the worker to break, by id; None: the busiest of the drill's role.
        extra: further traffic that a drill has sent.
        rng: for choices that shall be the same in each run.
    """

    access: Access
    address: str
    settings: Settings
    model: api_pb2.GetModelInfoResponse
    traffic: Traffic
    note: Callable[[str], None]
    give_up_s: float
    target: str | None = None
    extra: list[tuple[Traffic, list[Request]]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    async def busiest(self, role: str) -> api_pb2.WorkerStatus:
        """Or the target, if one is named.

        Raises:
            FailedPrecondition: no such worker of that role is ready.
        """
        ready = [one for one in await self._ready(role) if self.target in (None, one.id)]
        if not ready:
            raise FailedPrecondition(f"no {role} worker{f' {self.target}' if self.target else ''} is ready")
        return max(ready, key=lambda worker: (worker.num_running + worker.num_waiting, worker.id))

    async def num_cache_tokens(self, role: str) -> int:
        """That all ready workers of that role can hold together."""
        return sum(worker.num_blocks_total for worker in await self._ready(role)) * self.model.block_size

    async def _ready(self, role: str) -> list[api_pb2.WorkerStatus]:
        info = await self.server_info()
        return [worker for worker in info.workers if worker.role == role and worker.state == "ready"]

    async def server_info(self) -> api_pb2.GetServerInfoResponse:
        _, info = await describe(self.address, self.give_up_s)
        return info

    async def ask_controller(self, request: ControlRequest) -> dict[str, Any]:
        return await self.access.ask(request, self.note)

    async def kill(self, role: str) -> Broken:
        """The busiest worker of that role, while an answer streams."""
        await self.traffic.wait_streaming()
        worker = await self.busiest(role)
        self.note(f"killing {worker.id} (process {worker.pid})")
        return await self._killed(host_of(worker.address), worker.pid, worker.id, worker.epoch)

    async def kill_router(self) -> Broken:
        await self.traffic.wait_streaming()
        pid = (await self.server_info()).router_pid
        self.note(f"killing the router (process {pid})")
        return await self._killed(host_of(self.address), pid, None, "")

    async def _killed(self, host: str, pid: int, target: str | None, epoch: str) -> Broken:
        at_s = await self.access.hands.signal(host, pid, signal.SIGKILL)
        return Broken(at_s=at_s, target=target, epoch=epoch, is_over_s=at_s)

    async def stall(self, role: str, seconds: float) -> Broken:
        """The busiest worker of that role stands still for so long."""
        await self.traffic.wait_streaming()
        worker = await self.busiest(role)
        self.note(f"stopping {worker.id} (process {worker.pid}) for {seconds:g} s")
        hands, host = self.access.hands, host_of(worker.address)
        at_s = await hands.signal(host, worker.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            await hands.signal(host, worker.pid, signal.SIGCONT)
        return Broken(
            at_s=at_s, target=worker.id, epoch=worker.epoch, is_over_s=time.monotonic(),
            details=(f"it stood still for {seconds:g} s",),
        )

    async def send(self, requests: list[Request], *, num_clients: int) -> Traffic:
        """Beside the steady traffic; each once. Returns when all have ended."""
        traffic = Traffic(
            self.address, requests, num_clients=num_clients, give_up_s=self.give_up_s, limit=len(requests)
        )
        self.extra.append((traffic, requests))
        await traffic.run()
        return traffic

    def fresh_requests(self, count: int, *, prompt_tokens: int, max_tokens: int) -> list[Request]:
        """Of random tokens that nobody has cached."""
        sampling = SamplingFields(
            temperature=0.8, seed=self.rng.getrandbits(32), max_tokens=max_tokens, ignore_eos=True, logprobs=0
        )
        return [
            Request(
                prompt=TokensPrompt(
                    token_ids=tuple(self.rng.randrange(self.model.vocab_size) for _ in range(prompt_tokens))
                ),
                sampling=sampling,
            )
            for _ in range(count)
        ]


async def describe(
    address: str, patience_s: float
) -> tuple[api_pb2.GetModelInfoResponse, api_pb2.GetServerInfoResponse]:
    """What the router at `address` says of its model and its workers. A host that is busy with traffic may be late.

    Raises:
        Unavailable: nobody has answered for `patience_s`.
    """
    deadline_s = time.monotonic() + patience_s
    async with router_client(address) as client:
        while True:
            try:
                return await client.model_info(), await client.server_info()
            except Unavailable:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(RETRY_S)


def host_of(address: str) -> str:
    """Of "host:port"."""
    return address.rpartition(":")[0].strip("[]")


def steady_requests(count: int, settings: Settings, model: api_pb2.GetModelInfoResponse) -> list[Request]:
    """What the clients ask, over and over: those of a verification, with answers that take a while."""
    limits = CaseLimits(
        vocab_size=model.vocab_size, max_context_length=model.max_context_length, block_size=model.block_size,
        chunk_tokens=settings.engine.chunk_tokens,
        max_speculate=settings.decode.speculate if model.num_draft_layers else 0,
    )
    requests = []
    for case in make_cases(count, 11, limits):
        room = model.max_context_length - limits.max_prompt_tokens
        max_tokens = min(room, LONGEST_ANSWER_TOKENS * (1 + case.number % 2) // 2)
        sampling = replace(case.sampling, max_tokens=max_tokens, ignore_eos=True, min_tokens=None)
        requests.append(Request(prompt=case.prompt, sampling=sampling))
    return requests
