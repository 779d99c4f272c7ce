"""The transport inside one process, with a plan of faults: the test double for everything that goes wrong.

Both halves share a `LoopbackNetwork`. By default it is a plain copy. Its fetches cannot be cancelled: like a remote
DMA that nobody can call back, a stalled one still writes when it goes on, although it was given up. That is what
quarantine is for. Only revoking the memory ends it: `quiesce` does that after `ENDING_MS`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.transport import Authorize, Capabilities, Connection, Ending, Fetched, Metadata, Spans
from kv_transfer.wire import Fields
from pd_engine.cache.arena import Arena, component_offsets
from pd_engine.errors import DeadlineExceeded, Gone, InvalidArgument, Unavailable
from pd_engine.service.ids import NewId, random_id

NAME = "loopback"
ENDING_MS = 1_000
NUM_DELAY_TURNS = 50  # of the event loop

Copy = tuple[int, int, int]
"""(source offset, destination offset, length)"""

OnCopy = Callable[[int, int], None]


def _ignore(offset: int, length: int) -> None:
    return


class FaultKind(Enum):
    NONE = "none"
    DELAY = "delay"      # everybody else goes first
    STALL = "stall"      # waits for `FaultPlan.resume`
    DROP = "drop"        # nothing more is copied, and nothing is ever answered
    REORDER = "reorder"  # the ranges arrive last first, and later fetches may end before this one
    CORRUPT = "corrupt"  # the byte is changed
    KILL = "kill"        # the source dies
    CALL = "call"        # `action` runs: a test changes the source under the reader


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to one fetch, once `at_byte` of its bytes have arrived."""

    kind: FaultKind
    at_byte: int = 0
    action: Callable[[], None] = field(default=lambda: None)


class FaultPlan:
    """Faults for the fetches to come, one a fetch, in order; afterwards none."""

    def __init__(self, faults: list[Fault] | None = None) -> None:
        self._faults = deque(faults or [])
        self._resumed = asyncio.Event()
        self.num_stalled = 0

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)

    def next(self) -> Fault:
        return self._faults.popleft() if self._faults else Fault(kind=FaultKind.NONE)

    def resume(self) -> None:
        """Everything that stalls goes on now."""
        self._resumed.set()
        self._resumed = asyncio.Event()

    async def wait(self) -> None:
        self.num_stalled += 1
        try:
            await self._resumed.wait()
        finally:
            self.num_stalled -= 1


@dataclass(slots=True)
class _Served:
    arena: Arena
    epoch: str
    authorize: Authorize


class LoopbackNetwork:
    """The sources that pullers of this process can reach, by name."""

    def __init__(self) -> None:
        self.served: dict[str, _Served] = {}


class LoopbackSource:
    """Serves an arena to the pullers of the same network."""

    name = NAME

    def __init__(self, network: LoopbackNetwork, new_id: NewId = random_id) -> None:
        self._network = network
        self._address = new_id()

    async def start(self, arena: Arena, epoch: str, authorize: Authorize) -> None:
        self._network.served[self._address] = _Served(arena, epoch, authorize)

    def metadata(self) -> Metadata:
        return {"address": self._address}

    async def stop(self) -> None:
        self._network.served.pop(self._address, None)


class LoopbackPull:
    """Args:
    plan: what goes wrong, over all connections.
    on_copy: told (offset, length) of each range of the arena before it is written, in the context of its fetch.
    """

    name = NAME
    capabilities = Capabilities(ending=Ending.REVOKE, ending_ms=ENDING_MS, one_sided=False, across_hosts=False)

    def __init__(
        self, network: LoopbackNetwork, arena: Arena, plan: FaultPlan | None = None, on_copy: OnCopy = _ignore
    ) -> None:
        self._network = network
        self._arena = arena
        self._plan = plan or FaultPlan()
        self._on_copy = on_copy

    async def connect(
        self, metadata: Metadata, *, epoch: str, token: str, num_blocks: int, timeout_s: float
    ) -> Connection:
        fields = Fields(dict(metadata), NAME)
        address = fields.text("address", 64)
        fields.done()
        served = self._network.served.get(address)
        if served is None:
            raise Unavailable("nobody serves there")
        if served.epoch != epoch or served.authorize(token) is None:
            raise Gone
        if component_offsets(self._arena.layout, num_blocks)[1] != served.arena.num_bytes:
            raise InvalidArgument(f"{NAME}: the arena is not of {num_blocks} blocks of this layout")
        return LoopbackConnection(self._network, address, served, self._arena, self._plan, self._on_copy)

    async def close(self) -> None:
        return


class LoopbackConnection:
    """Copies in tasks of its own, which outlive whoever waits for them."""

    def __init__(
        self, network: LoopbackNetwork, address: str, served: _Served, arena: Arena, plan: FaultPlan,
        on_copy: OnCopy,
    ) -> None:
        self._network = network
        self._address = address
        self._served = served
        self._arena = arena
        self._plan = plan
        self._on_copy = on_copy
        self._unfinished: set[asyncio.Task[Fetched]] = set()
        self._given_up: set[asyncio.Task[Fetched]] = set()  # of those, the ones that nobody waits for
        self._is_dead = False

    @property
    def usable(self) -> bool:
        return not self._is_dead and self._address in self._network.served

    async def fetch(self, spans: Spans, *, token: str, timeout_s: float) -> Fetched:
        if not self.usable:
            raise Unavailable("the source is gone")
        allowed = self._served.authorize(token)
        if allowed is None or not allowed.issuperset(spans.block_ids.tolist()):
            raise Gone
        transfer = asyncio.create_task(self._transfer(spans, self._plan.next()))
        self._unfinished.add(transfer)
        transfer.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(transfer)
        except TimeoutError:
            raise DeadlineExceeded(f"{spans.num_bytes} bytes did not come within {timeout_s} s") from None
        finally:
            if not transfer.done():
                self._given_up.add(transfer)

    async def quiesce(self) -> None:
        if self._given_up:
            await asyncio.wait(set(self._given_up), timeout=ENDING_MS / 1000)
        if self._given_up:
            await self.close()

    async def close(self) -> None:
        """Revokes the memory: nothing is written afterwards."""
        self._is_dead = True
        for transfer in self._unfinished:
            transfer.cancel()
        if self._unfinished:
            await asyncio.wait(set(self._unfinished))

    async def _transfer(self, spans: Spans, fault: Fault) -> Fetched:
        generations = self._served.arena.generations
        before = generations[spans.block_ids]
        copies = list(zip(spans.source_offsets.tolist(), spans.offsets.tolist(), spans.lengths.tolist(), strict=True))
        if fault.kind is FaultKind.REORDER:
            copies.reverse()
        arrived, to_come = _split(copies, fault.at_byte)
        self._copy(arrived)
        await self._strike(fault)
        self._copy(to_come)
        if fault.kind is FaultKind.CORRUPT:
            self._arena.buffer[(to_come or copies)[0][1]] ^= 0x10
        return Fetched(generations_before=before, generations_after=generations[spans.block_ids])

    async def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.DELAY | FaultKind.REORDER:
                for _ in range(NUM_DELAY_TURNS):
                    await asyncio.sleep(0)
            case FaultKind.STALL:
                await self._plan.wait()
            case FaultKind.DROP:
                await asyncio.Event().wait()
            case FaultKind.KILL:
                self._is_dead = True
                raise Unavailable("the source died")
            case FaultKind.CALL:
                fault.action()
            case FaultKind.NONE | FaultKind.CORRUPT:
                return

    def _copy(self, copies: list[Copy]) -> None:
        for start, target, length in copies:
            self._on_copy(target, length)
            self._arena.buffer[target : target + length] = self._served.arena.buffer[start : start + length]

    def _ended(self, transfer: asyncio.Task[Fetched]) -> None:
        self._unfinished.discard(transfer)
        self._given_up.discard(transfer)
        if not transfer.cancelled():
            transfer.exception()  # nobody may be left to look at it


def _split(copies: list[Copy], at_byte: int) -> tuple[list[Copy], list[Copy]]:
    """The first `at_byte` bytes, and the rest."""
    head: list[Copy] = []
    room = at_byte
    for index, (start, target, length) in enumerate(copies):
        if length > room:
            if room:
                head.append((start, target, room))
            return head, [(start + room, target + room, length - room), *copies[index + 1 :]]
        head.append((start, target, length))
        room -= length
    return head, []
