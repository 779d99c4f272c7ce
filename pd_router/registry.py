"""All workers that this router knows: who may join, who is ready, and what placement sees of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import grpc.aio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import FailedPrecondition, InvalidArgument
from pd_engine.service.ids import NewId, random_id
from pd_router.link import WorkerLink
from pd_router.link_state import LinkState, Role, WorkerEndpoint
from pd_router.pools import Snapshot, WorkerView
from pd_router.prefix_index import PrefixIndex
from pd_router.views import decode_view, prefill_view

IDENTITY_FIELDS = ("fingerprint", "layout_version", "block_size", "bytes_per_token", "dtype")
CONNECT_TIMEOUT_S = 5.0


def check_endpoint(endpoint: WorkerEndpoint, info: pb.WorkerInfo) -> None:
    """Raises:
    FailedPrecondition: somebody else answers at this address.
    """
    for field, expected in (("worker_id", endpoint.worker_id), ("role", endpoint.role)):
        found = getattr(info, field)
        if found != expected:
            raise FailedPrecondition(
                f"worker {endpoint.worker_id} at {endpoint.address}: its {field} is {found!r}, expected {expected!r}"
            )


def check_agreement(info: pb.WorkerInfo, others: Iterable[pb.WorkerInfo]) -> None:
    """Workers that hand over to each other must hold the same model in the same layout.

    Raises:
        FailedPrecondition: a field differs from another worker's; both values are named.
    """
    for other in others:
        for field in IDENTITY_FIELDS:
            ours, theirs = getattr(info, field), getattr(other, field)
            if ours != theirs:
                raise FailedPrecondition(
                    f"worker {info.worker_id} is refused: its {field} is {ours!r}, worker {other.worker_id} has "
                    f"{theirs!r}"
                )


class Registry:
    """Args:
    open_channel: to a worker's address, with the cluster secret.
    may_degrade: without a prefill worker, decode workers compute prompts.

    Attributes:
    router_id: names this life of this router to workers.
    index: what they have cached.
    """

    def __init__(
        self,
        *,
        open_channel: Callable[[str], grpc.aio.Channel],
        lease_ms: int,
        silence_ms: int,
        max_index_entries: int,
        can_fetch: bool,
        may_degrade: bool,
        new_id: NewId = random_id,
    ) -> None:
        """`can_fetch`: workers that compute prompts take cached blocks from other workers."""
        self.router_id = new_id()
        self.index = PrefixIndex(max_entries=max_index_entries)
        self._open_channel = open_channel
        self._can_fetch = can_fetch
        self._renew_interval_s = lease_ms / 3 / 1000
        self._may_degrade = may_degrade
        self._silence_s = silence_ms / 1000
        self._links: dict[str, WorkerLink] = {}
        self._change = asyncio.Event()

    async def set_workers(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        """From now on these are the workers: new ones are connected, missing ones dropped.

        Returns once every one has answered or a bound has passed. Those that have not are tried again and again, as
        are those that were refused.

        Raises:
            InvalidArgument: two workers have one id, or a role does not exist; nothing was changed.
            FailedPrecondition: some do not fit the others, which are in use; both values are named.
        """
        wanted = {endpoint.worker_id: endpoint for endpoint in endpoints}
        if len(wanted) != len(endpoints):
            raise InvalidArgument("every worker id must be given once")
        for endpoint in endpoints:
            if endpoint.role not in {role.value for role in Role}:
                raise InvalidArgument(f"worker {endpoint.worker_id}: role must be prefill or decode")
        dropped = [
            link
            for link in self._links.values()
            if link.worker_id not in wanted or not wanted[link.worker_id].is_same_place(link.endpoint)
        ]
        for link in dropped:
            del self._links[link.worker_id]
        for link in self._links.values():
            link.endpoint = wanted[link.worker_id]
            link.view = None
        for endpoint in endpoints:
            if endpoint.worker_id not in self._links:
                self._links[endpoint.worker_id] = self._connect(endpoint)
        self._changed()
        await asyncio.gather(*(link.close() for link in dropped))
        for link in dropped:
            if link.worker_id not in self._links:
                self.index.forget(link.worker_id)
        waits = [
            asyncio.create_task(link.settled.wait()) for link in self._links.values() if link.endpoint.is_expected
        ]
        if waits:
            _, late = await asyncio.wait(waits, timeout=CONNECT_TIMEOUT_S)
            for wait in late:
                wait.cancel()
        refused = [link.error for link in self._links.values() if link.state is LinkState.REFUSED and link.error]
        if refused:
            raise FailedPrecondition("; ".join(error.message for error in refused))

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))

    def links(self, role: Role | None = None) -> list[WorkerLink]:
        return [link for link in self._links.values() if role is None or link.role is role]

    def link(self, worker_id: str) -> WorkerLink | None:
        return self._links.get(worker_id)

    @property
    def serving(self) -> bool:
        """Whether requests find who computes their prompts and who continues them."""
        ready = [link for link in self._links.values() if link.state is LinkState.READY]
        decode = [link.info for link in ready if link.role is Role.DECODE and link.info is not None]
        if any(link.role is Role.PREFILL for link in ready):
            return bool(decode)
        return self._may_degrade and any(info.computes_prompts for info in decode)

    @property
    def identity(self) -> pb.WorkerInfo | None:
        """Of some worker, a present one if there is any; those agree on `IDENTITY_FIELDS`."""
        known = [link.info for link in [*self._members(), *self._links.values()] if link.info is not None]
        return known[0] if known else None

    @property
    def block_size(self) -> int:
        """Tokens a block; 1 before any worker has joined, as nothing can be placed then."""
        return self.identity.block_size if self.identity is not None else 1

    @property
    def max_context_length(self) -> int | None:
        """Tokens that every worker takes, None before the first has joined."""
        return min((link.info.max_context_length for link in self._links.values() if link.info), default=None)

    @property
    def num_decode_slots(self) -> int | None:
        """Tokens that the largest decode worker can hold, None before the first has joined."""
        infos = [link.info for link in self.links(Role.DECODE) if link.info is not None]
        return max((info.num_blocks_total * info.block_size for info in infos), default=None)

    @property
    def max_speculate(self) -> int:
        """Draft tokens a step that every worker can do; 0 before the first has joined."""
        return min((link.info.max_speculate for link in self._links.values() if link.info), default=0)

    async def wait_change(self) -> None:
        """Until a worker has reported, come or gone, or room may have become free."""
        await self._change.wait()

    def note_room(self) -> None:
        """A journey has left its workers."""
        self._changed()

    async def flushed(self) -> None:
        """Until nothing is left to be released anywhere."""
        await asyncio.gather(*(link.flushed() for link in self._links.values()))

    def snapshot(self, block_hashes: Sequence[bytes] = ()) -> Snapshot:
        """Both pools now, and who has how much cached of a prompt with these full blocks."""
        return Snapshot(
            prefill=self._views(Role.PREFILL, prefill_view),
            decode=self._views(Role.DECODE, partial(decode_view, prefill=self.links(Role.PREFILL))),
            held=self.index.held(block_hashes),
            prefill_is_measured=any(link.load.prefill_ms_per_token is not None for link in self.links(Role.PREFILL)),
            itl_is_measured=any(link.load.itl.is_measured for link in self.links(Role.DECODE)),
            can_fetch=self._can_fetch,
        )

    def _views(self, role: Role, make: Callable[[WorkerLink, list[WorkerLink]], WorkerView]) -> tuple[WorkerView, ...]:
        """Only those of workers that have changed are made anew."""
        links = self.links(role)
        for link in links:
            if link.view is None:
                link.view = make(link, links)
        return tuple([link.view for link in links if link.view is not None])

    def _connect(self, endpoint: WorkerEndpoint) -> WorkerLink:
        return WorkerLink(
            endpoint,
            channel=self._open_channel(endpoint.address),
            router_id=self.router_id,
            renew_interval_s=self._renew_interval_s,
            silence_s=self._silence_s,
            index=self.index,
            check=self._check,
            on_change=self._changed,
        )

    def _check(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        check_endpoint(link.endpoint, info)
        others = [other for other in self._links.values() if other is not link and other.is_accepted]
        check_agreement(info, [other.info for other in others if other.info is not None])

    def _members(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.state in (LinkState.READY, LinkState.DRAINING)]

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
