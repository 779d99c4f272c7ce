"""One world: a cluster, its clients and its troubles, from one seed, played to the end and checked all the while."""

from __future__ import annotations

import asyncio
import contextvars
import random

from pd_ops.simulation.client import Client, Wish, plan_wishes
from pd_ops.simulation.cluster import NUM_BLOCKS, SimulatedCluster
from pd_ops.simulation.faults import Trouble, bad_fetches, drained_worker, lost_router, plan_faults
from pd_ops.simulation.loop import VirtualLoop
from pd_ops.simulation.members import SETTINGS, address_of
from pd_ops.simulation.process import Process
from pd_ops.simulation.story import Story
from pd_ops.simulation.watch import Watch
from pd_router.journey import Journey

RECOVERY_S = 25.0  # after the last trouble and the last arrival: until every request must have ended
SETTLE_S = 15.0    # after that: until nothing may be left anywhere
RELEASE_S = 2.0    # after the end of a journey while all is calm: until it holds no block; a slow step takes 1.5 s
LONG_STEPS_SHARE = 0.3  # of all worlds: few workers and long requests, most of them at one time
QUIET_SHARE = 0.4  # of these: nothing goes wrong, so that nothing may fail
LOSS_SHARE = 0.3   # of these: nothing but the loss of a router, whose choices would go on for long
BAD_FETCHES_SHARE = 0.2  # of all other worlds: beside whatever else goes wrong, with room to be placed again at once
DRAIN_SHARE = 0.15  # of all worlds but those of long steps: a worker is told to end
TWO_CHOICES_SHARE = 0.15  # of all requests
LONG_FACTOR = 2.0  # of what is waited for in such a world
LOOK_S = 0.25
MAX_SLOTS = (NUM_BLOCKS["decode"] - 2) * SETTINGS.engine.block_size  # of one request


class Violation(Exception):
    """Something happened that never may."""


class World:
    """Attributes:
    story: of what has happened.
    violations: what never may happen and did.
    is_over: nothing counts any more.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.story = Story()
        self.violations: list[str] = []
        self.is_over = False
        self.loop = VirtualLoop(self._after_event, self._on_error)  # type: ignore[abstract]  # no sockets, no signals
        chance = self._chance("world")
        self._has_long_steps = chance.random() < LONG_STEPS_SHARE
        counts = {role: 1 if self._has_long_steps else chance.randint(1, 2) for role in NUM_BLOCKS}
        fate = chance.random() if self._has_long_steps else 1.0
        loses_router = QUIET_SHARE <= fate < QUIET_SHARE + LOSS_SHARE
        fetches_badly = not self._has_long_steps and chance.random() < BAD_FETCHES_SHARE
        room = {role: count * (2 if fetches_badly else 1) for role, count in NUM_BLOCKS.items()}
        self.cluster = SimulatedCluster(
            self.loop, worker_names=[f"{role}-{number}" for role in counts for number in range(counts[role])],
            router_names=[f"router-{number}" for number in range(2 if loses_router else chance.randint(1, 2))],
            num_blocks=room, has_long_steps=self._has_long_steps, chance=self._chance, tell=self.tell,
            complain=self.complain, on_end=self._journey_ended,
        )
        if fate < QUIET_SHARE:
            self.troubles: list[Trouble] = []
        elif loses_router:
            self.troubles = [lost_router(self._chance("faults"), self.cluster.router_names[-1])]
        else:
            self.troubles = plan_faults(
                self._chance("faults"), workers=self.cluster.worker_names, routers=self.cluster.router_names
            )
        if fetches_badly:
            self.troubles += bad_fetches([name for name in self.cluster.worker_names if name.startswith("decode")])
        drains = self._chance("drains")
        if not self._has_long_steps and drains.random() < DRAIN_SHARE:
            self.troubles.append(drained_worker(drains, self.cluster.worker_names))
        choices = self._chance("choices")
        self.wishes = plan_wishes(
            self._chance("clients"), num_routers=len(self.cluster.router_names), max_slots=MAX_SLOTS,
            is_busy=self._has_long_steps, draw_choices=lambda: 2 if choices.random() < TWO_CHOICES_SHARE else 1,
        )
        self.clients: list[Client] = []

    # Telling

    def tell(self, process: Process | None, text: str, is_routine: bool = False) -> None:
        self.story.add(self.loop.now_s, "world" if process is None else process.label, text, is_routine=is_routine)

    def complain(self, text: str) -> None:
        if not self.is_over:
            self.violations.append(text)
            self.story.add(self.loop.now_s, "world", f"VIOLATION: {text}")

    # The course of it

    async def play(self) -> None:
        """Raises Violation."""
        await self.cluster.start(Watch(tell=self.tell, complain=self.complain, has_verified=self._has_verified))
        begun_s = self.loop.now_s
        asks = [self._ask(wish, begun_s) for wish in self.wishes]
        strikes = [self.loop.create_task(self._strike(trouble, begun_s)) for trouble in self.troubles]
        last_s = begun_s + max([self.wishes[-1].at_s, *(trouble.end_s for trouble in self.troubles)])
        recovery_s = RECOVERY_S * (LONG_FACTOR if self._has_long_steps else 1.0)
        await asyncio.wait(asks, timeout=last_s + recovery_s - self.loop.now_s)
        for client in self.clients:
            if client.ended is None:
                self.complain(f"{client.wish.name} has not ended {recovery_s:g} s after all troubles were over")
        self._check_violations()
        await asyncio.gather(*strikes)
        await self._settle()

    async def _settle(self) -> None:
        end_s = self.loop.now_s + SETTLE_S
        while leftovers := self.cluster.leftovers():
            if self.loop.now_s > end_s:
                self.complain(f"left {SETTLE_S:g} s after the last request: {'; '.join(leftovers)}")
                break
            await asyncio.sleep(LOOK_S)
        for worker in self.cluster.workers.values():
            try:
                worker.check_cache()
            except AssertionError as error:
                self.complain(f"{worker.process.label}: {error}")
        self._check_violations()

    async def end(self) -> None:
        """Lets everything go, without looking: what is left of killed processes too."""
        for process in [process for lives in self.cluster.processes.values() for process in lives]:
            self.loop.go_on(process)
        for _ in range(10):
            pending = [task for task in self.loop.tasks if not task.done() and task is not asyncio.current_task()]
            if not pending:
                break
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=10.0)
        for worker in self.cluster.members.values():
            worker.close()

    def _ask(self, wish: Wish, begun_s: float) -> asyncio.Task[None]:
        process = self.cluster.new_process(wish.name)
        client = Client(
            wish, network=self.cluster.network, routers=[address_of(name) for name in self.cluster.router_names],
            complain=self.complain, tell=lambda text: self.tell(process, text),
        )
        self.clients.append(client)

        async def ask() -> None:
            await asyncio.sleep((begun_s + wish.at_s - self.loop.now_s) * process.clock_rate)
            await client.run()

        return self.loop.create_task(ask(), context=process.context())

    async def _strike(self, trouble: Trouble, begun_s: float) -> None:
        await asyncio.sleep(begun_s + trouble.at_s - self.loop.now_s)
        await self.cluster.strike(trouble)

    # Looking

    def _after_event(self, process: Process | None) -> None:
        if self.is_over:
            return
        member = self.cluster.members.get(process) if process is not None else None
        if member is not None:
            try:
                member.check_books()
            except AssertionError as error:
                self.complain(f"{member.process.label}: {error}")
        if self.violations:
            self._check_violations()

    def _check_violations(self) -> None:
        if self.violations and not self.is_over:
            raise Violation(self.violations[0])

    def _journey_ended(self, journey: Journey) -> None:
        """In a router. While all is calm no attempt fails but for want of room, and its blocks are free soon."""
        def look() -> None:
            if self.cluster.is_calm:
                for worker in self.cluster.workers.values():
                    for owner in worker.holds(journey.journey_id):
                        self.complain(f"{worker.process.label}: {owner} has blocks {RELEASE_S:g} s after its end")

        if journey.num_failures and not self.cluster.num_troubles:
            self.complain(f"journey {journey.journey_id[:6]}: {journey.num_failures} attempts failed without a trouble")
        if self.cluster.is_calm:
            self.loop.call_at_world(self.loop.now_s + RELEASE_S, look, context=contextvars.Context())

    def _on_error(self, process: Process | None, message: str, error: BaseException | None) -> None:
        if not (isinstance(error, asyncio.CancelledError) or (process is not None and not process.is_alive)):
            self.complain(f"{message}: {type(error).__name__}: {error}")

    def _has_verified(self, journey_id: str, attempt: int) -> bool:
        """No decode worker that lives waits for anything of it."""
        return not any(
            (key.journey_id, key.attempt) == (journey_id, attempt)
            for worker in self.cluster.workers.values() for key in worker.leases()
        )

    def _chance(self, what: str) -> random.Random:
        return random.Random(f"{self.seed}/{what}")
