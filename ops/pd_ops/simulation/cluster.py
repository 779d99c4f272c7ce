"""The simulated cluster: its processes, their lives, and the troubles that strike them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from typing import Any

from pd_ops.simulation.around import SimulatedSurroundings
from pd_ops.simulation.faults import DRAIN_S, FaultName, Trouble
from pd_ops.simulation.loop import VirtualLoop
from pd_ops.simulation.members import SimulatedRouter, SimulatedWorker, address_of
from pd_ops.simulation.network import Network
from pd_ops.simulation.process import Process
from pd_ops.simulation.server import Witness
from pd_ops.simulation.transfers import Places
from pd_ops.simulation.weather import Front, SeededPace, SeededWeather, fetch_faults
from pd_router.journey import Journey
from pd_router.link_state import WorkerEndpoint

BAD_FETCHES = 0.5  # share of those that something happens to
STORM = 0.3        # share of messages or calls
CALM_AFTER_S = 4.0  # after a trouble
DESERTED_S = 1.6   # after a router's death: a lease, and the time of a look
CLOCK_RATES = (0.98, 1.02)
NUM_BLOCKS = {"prefill": 36, "decode": 26}  # of a worker of that role: too few for all at once
STORMS = {FaultName.SLOW: "slow", FaultName.LOST_REPLIES: "lost", FaultName.DUPLICATES: "doubled"}


class SimulatedCluster:
    """Args:
    num_blocks: of a worker of that role.
    has_long_steps: its workers take several steps a second, not a hundred.
    chance: random numbers for what is named.
    tell, complain: what happens, and what never may.
    on_end: told of each journey that has ended in a router.

    Attributes:
        workers, routers: that live, by name.
        members: workers by process.
        processes: all lives, by name, oldest first.
        num_troubles: that have begun so far.
        num_troubles_now, last_trouble_s: of these, that are not over, and when the last one was.
    """

    def __init__(
        self, loop: VirtualLoop, *, worker_names: Sequence[str], router_names: Sequence[str],
        num_blocks: Mapping[str, int], has_long_steps: bool,
        chance: Callable[[str], random.Random], tell: Callable[[Process | None, str], None],
        complain: Callable[[str], None], on_end: Callable[[Journey], None],
    ) -> None:
        self.worker_names = worker_names
        self.router_names = router_names
        self._num_blocks = num_blocks
        self._has_long_steps = has_long_steps
        self.weather = SeededWeather(random=chance("network"))
        self.network = Network(loop, self.weather)
        self.workers: dict[str, SimulatedWorker] = {}
        self.routers: dict[str, SimulatedRouter] = {}
        self.members: dict[Process, SimulatedWorker] = {}
        self.processes: dict[str, list[Process]] = {}
        self._loop = loop
        self._places = Places()
        self._chance = chance
        self._tell = tell
        self._complain = complain
        self._on_end = on_end
        self._deaths: dict[Process, asyncio.Future[None]] = {}
        self._ids = chance("ids")
        self._bad_fetches: Counter[str] = Counter()
        self.num_troubles = 0
        self.num_troubles_now = 0
        self.last_trouble_s = -CALM_AFTER_S

    async def start(self, witness: Witness) -> None:
        self._witness = witness
        for names, start in ((self.worker_names, self._start_worker), (self.router_names, self._start_router)):
            await asyncio.gather(*(self._loop.create_task(start(name)) for name in names))

    def new_process(self, name: str) -> Process:
        lives = self.processes.setdefault(name, [])
        chance = self._chance(f"clock {name} {len(lives)}")
        process = Process(
            name=name, life=len(lives) + 1, clock_offset_s=chance.uniform(0.0, 1e5),
            clock_rate=chance.uniform(*CLOCK_RATES),
        )
        lives.append(process)
        return process

    def leftovers(self) -> list[str]:
        """What requests that have ended have left anywhere, in words."""
        members: list[SimulatedWorker | SimulatedRouter] = [*self.workers.values(), *self.routers.values()]
        return [f"{member.process.label}: {text}" for member in members for text in member.leftovers()]

    @property
    def is_calm(self) -> bool:
        """No trouble, nor what comes of one."""
        return not self.num_troubles_now and self._loop.now_s >= self.last_trouble_s + CALM_AFTER_S

    async def strike(self, trouble: Trouble) -> None:
        """Returns when it is over. One at a time kills or stops a process."""
        process = self.processes[trouble.target][-1]
        if not process.is_running or (trouble.name is FaultName.DRAIN and process not in self.members):
            return  # or it has not started yet
        self.num_troubles += 1
        self.num_troubles_now += 1
        self._tell(None, str(trouble))
        match trouble.name:
            case FaultName.CRASH:
                await self._crash(process, trouble.seconds)
            case FaultName.DRAIN:
                await self._drain(process, trouble.seconds)
            case FaultName.STOP:
                await self._stop(process, trouble.seconds)
            case FaultName.CUT:
                await self._cut(trouble)
            case FaultName.BAD_FETCHES:
                self._bad_fetches[trouble.target] += 1
                await asyncio.sleep(trouble.seconds)
                self._bad_fetches[trouble.target] -= 1
            case FaultName.SLOW | FaultName.LOST_REPLIES | FaultName.DUPLICATES:
                front = self.weather.fronts.setdefault(trouble.target, Front())
                setattr(front, STORMS[trouble.name], STORM)
                await asyncio.sleep(trouble.seconds)
                setattr(front, STORMS[trouble.name], 0.0)
        self._tell(None, f"over: {trouble}")
        self.num_troubles_now -= 1
        self.last_trouble_s = self._loop.now_s

    # Lives

    async def _start_worker(self, name: str) -> None:
        process, role = self.new_process(name), name.partition("-")[0]
        faults = fetch_faults(
            self._chance(f"fetches {process.label}"), lambda: BAD_FETCHES if self._bad_fetches[name] else 0.0
        )
        around = SimulatedSurroundings(
            process=process, network=self.network, places=self._places, witness=self._witness,
            pace=SeededPace(self._chance(f"pace {process.label}"), has_long_steps=self._has_long_steps),
            faults=faults, num_blocks=self._num_blocks[role], new_id=self._new_id,
            complain=lambda text: self._complain(f"{process.label}: {text}"),
        )

        async def start() -> None:
            worker = SimulatedWorker(role, around)
            await worker.start()
            self.workers[name] = self.members[process] = worker

        await self._begin(process, start())

    async def _start_router(self, name: str) -> None:
        process = self.new_process(name)
        endpoints = [WorkerEndpoint(each, each.partition("-")[0], address_of(each)) for each in self.worker_names]

        async def start() -> None:
            router = SimulatedRouter(process, self.network, self._witness, self._new_id, self._on_end)
            self.routers[name] = router
            await router.start(endpoints)

        await self._begin(process, start())

    async def _begin(self, process: Process, start: Coroutine[Any, Any, None]) -> None:
        """Until it has started, or has been killed meanwhile."""
        self._tell(process, "starts")
        died = self._deaths[process] = self._loop.create_future()
        starting = self._loop.create_task(start, context=process.context())
        await asyncio.wait([starting, died], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()

    async def _crash(self, process: Process, seconds: float) -> None:
        process.is_alive = False
        self._deaths[process].set_result(None)
        if process.name in self.routers:
            self._look_whom_it_leaves(self.routers.pop(process.name))
        self.network.died(process)
        self._places.died(process)
        self.workers.pop(process.name, None)
        await asyncio.sleep(seconds)
        if process.name in self.worker_names:
            await self._start_worker(process.name)
        else:
            await self._start_router(process.name)

    async def _drain(self, process: Process, seconds: float) -> None:
        """As a worker ends that is told to, unless it is killed meanwhile."""
        ending = self._loop.create_task(self.members[process].end(DRAIN_S), context=process.context())
        await asyncio.wait([ending, self._deaths[process]], return_when=asyncio.FIRST_COMPLETED)
        if process.is_alive:
            ending.result()
            await self._crash(process, seconds)

    def _look_whom_it_leaves(self, router: SimulatedRouter) -> None:
        """A worker that can know that a router is gone does nothing more for it soon."""
        died_s = self._loop.now_s
        knowing = [
            worker for worker in self.workers.values()
            if worker.process.is_running and not self.network.is_cut(worker.process, router.process)
        ]

        def look() -> None:
            for worker in knowing:
                if worker.process.is_running and worker.process.went_on_s < died_s:
                    for name in worker.serves(router.registry.router_id):
                        self._complain(
                            f"{worker.process.label}: {name} goes on {DESERTED_S:g} s after the death of "
                            f"{router.process.label}"
                        )

        self._loop.call_at_world(died_s + DESERTED_S, look, context=Context())

    async def _stop(self, process: Process, seconds: float) -> None:
        process.is_stopped = True
        self.network.stopped(process)
        await asyncio.sleep(seconds)
        self._loop.go_on(process)

    async def _cut(self, trouble: Trouble) -> None:
        everybody = [name for name in (*self.worker_names, *self.router_names) if name != trouble.target]
        others = [trouble.other] if trouble.other else everybody
        for other in others:
            self.network.cut(trouble.target, other)
        await asyncio.sleep(trouble.seconds)
        for other in others:
            self.network.heal(trouble.target, other)

    def _new_id(self) -> str:
        return f"{self._ids.getrandbits(128):032x}"
