"""Hypothesis drives a `World`: any order of calls, messages, copies, faults, deaths and time.

Most steps are drawn from a seed inside one rule, each time with other weights (a run in which nothing ever finishes,
one in which strangers take every block ...): a draw of Hypothesis's own for each step would take most of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.journey import JourneyKey
from pd_engine.cache.layout import CacheLayout
from support import handoff_network as network
from support import handoff_prefixes as prefixes
from support.handoff_checks import check, drain
from support.handoff_prompt import PAGED, Prompt
from support.handoff_sides import Parts, Source, Transfer
from support.handoff_world import LEASE_S, World

INDEX = st.integers(0, 1 << 16)
MAX_TOKENS = 22
MAX_LIVE = 5
PROGRESS = {
    "place": 3, "compute": 4, "prompt": 2, "deliver": 10, "fetch": 8, "copy": 3, "finish": 4, "commit": 3, "rush": 0.3,
    "sequences_end": 2, "keep": 1, "hold": 2, "pull_held": 3,
}
TROUBLE = {
    "place_again": 0.4, "repeat": 1, "end_early": 0.2, "cut": 0.2, "steal": 1, "damage": 1, "fail": 0.4, "quiesce": 3,
    "commit_twice": 1, "abort": 0.4, "release": 0.4, "time": 1, "lonely_time": 0.2, "router_renews": 1, "stranger": 2,
    "strangers_leave": 2, "source_dies": 0.1, "destination_dies": 0.1,
}
ACTIONS = tuple(PROGRESS | TROUBLE)


class HandoffMachine(RuleBasedStateMachine):
    """Set `parts`, `layout` and `never` (actions that are left out) in a subclass."""

    parts: Parts = Parts()
    layout: CacheLayout = PAGED
    never: frozenset[str] = frozenset()

    @initialize()
    def start(self) -> None:
        self.world = World(self.parts, layout=self.layout)
        self.attempts: dict[str, int] = {}
        self.num_steps = 0

    @rule(seed=INDEX, count=st.integers(10, 80))
    def things_happen(self, seed: int, count: int) -> None:
        """Any of the actions, some of them more often than others."""
        random = Random(seed)
        weights = [
            (PROGRESS | TROUBLE)[action] * random.choice((1, 1, 3) if action in PROGRESS else (0, 0, 1, 3))
            for action in ACTIONS
        ]
        for action in random.choices(ACTIONS, weights, k=count):
            self.act(action, random.randrange(1 << 16))

    @rule(seed=INDEX)
    def one_comes_through(self, seed: int) -> None:
        """From its placement to its end undisturbed, while others are under way."""
        self.act("place", seed)
        for job in [job for source in self.world.sources for job in source.jobs.values()]:
            self.world.compute_all(job)
        if self.world.streams:
            network.rush(self.world, self.world.streams[-1])

    @rule(seed=INDEX, how=st.sampled_from(["abort", "place_again", "lonely_time"]))
    def data_come_late(self, seed: int, how: str) -> None:
        """A lease ends while its fetches are under way; one of them is known to have ended; others want the room."""
        random = Random(seed)
        under_way = self._under_way(random)
        if under_way:
            fetch, destination = under_way[0].fetch, under_way[0].destination
            self._steps(seed, 0, self.world if how == "lonely_time" else fetch.lease.key)[how]()
            network.quiesce(self.world, random.choice(under_way))
            destination.add_stranger(self.world.new_name(), 14)
            for transfer in under_way:
                if transfer in self.world.transfers:
                    network.copy(self.world, transfer, random.randint(1, 9))
            check(self.world)

    @rule(seed=INDEX, dies=st.booleans())
    def source_moves_on(self, seed: int, dies: bool) -> None:
        """Fetches are under way when the source's pins end, and others take the blocks that are being read."""
        world, random = self.world, Random(seed)
        for transfer in self._under_way(random):
            network.copy(world, transfer, random.randint(0, 2))
            for source in [source for source in world.sources if source.arena is transfer.source_arena]:
                number, key = world.sources.index(source), transfer.fetch.lease.key
                world.release(key.journey_id, key.attempt, at_source=number)
                source.add_stranger(world.new_name(), 14)
                if dies:
                    world.restart_source(number)
            if transfer in world.transfers:
                network.finish(world, transfer)
        check(world)

    @rule(action=st.sampled_from(ACTIONS), index=INDEX)
    def one_thing_happens(self, action: str, index: int) -> None:
        self.act(action, index)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "world"):
            check(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            if sys.exc_info()[0] is None:  # else the first failure is the one to tell
                drain(self.world)
            self.world.dispose()

    def act(self, action: str, index: int) -> None:
        """One step of that kind with one of the things that it can be done to; nothing if there are none."""
        if action in self.never:
            return
        self.num_steps += 1
        targets = self._targets(action)
        if targets:
            number = index % len(targets)
            self._steps(index, number, targets[number])[action]()
            check(self.world)

    def _under_way(self, random: Random) -> list[Transfer]:
        """The fetches of one live lease, some just started."""
        world = self.world
        for _ in range(random.randint(1, 4)):
            network.start_fetch(world, random.choice(world.destinations))
        live = [transfer.fetch.lease for transfer in world.transfers if transfer.fetch.lease.is_live]
        if not live:
            return []
        lease = random.choice(live)
        return [transfer for transfer in world.transfers if transfer.fetch.lease is lease]

    def damage(self, transfer: Transfer) -> None:
        network.copy(self.world, transfer, 1, corrupt=True)

    def _targets(self, action: str) -> list[Any]:
        world = self.world
        match action:
            case "keep":
                return world.sources
            case "hold":
                return world.kept
            case "pull_held":
                return world.held
            case "compute" | "prompt" | "end_early":
                return [job for source in world.sources for job in source.jobs.values()]
            case "deliver" | "rush" | "cut" | "steal":
                return world.streams
            case "fetch" | "sequences_end" | "destination_dies":
                return world.destinations
            case "copy" | "finish" | "damage" | "fail" | "quiesce":
                return world.transfers
            case "commit" | "commit_twice":
                return world.commits
            case "abort" | "place_again":
                live = [key for destination in world.destinations for key in destination.book.live_keys()]
                return [key for key in live if action == "abort" or key not in world.held_until_s]
            case "repeat" | "release" | "router_renews":
                return list(self.attempts)
            case "stranger" | "strangers_leave":
                return [*world.sources, *world.destinations]
            case "source_dies":
                return world.sources
            case _:
                return [world]

    def _steps(self, index: int, number: int, target: Any) -> dict[str, Callable[[], object]]:
        world = self.world
        return {
            "place": lambda: self._place_new(index),
            "compute": lambda: world.compute(target, 1 + index % 7),
            "prompt": lambda: world.compute_all(target),
            "deliver": lambda: network.deliver(world, target),
            "fetch": lambda: network.start_fetch(world, target),
            "copy": lambda: network.copy(world, target, 1 + index % 3),
            "finish": lambda: network.finish(world, target),
            "commit": lambda: network.deliver_commit(world, number),
            "rush": lambda: network.rush(world, target),
            "sequences_end": lambda: [world.end_running(target, key) for key in list(target.running)],
            "keep": lambda: self._keep(target, index),
            "hold": lambda: self._hold(*target, index),
            "pull_held": lambda: prefixes.pull(world, target),
            "place_again": lambda: self._place_again(target, index),
            "repeat": lambda: self._repeat_old_calls(target, index),
            "end_early": lambda: world.close(target, ends_request=True),
            "cut": lambda: world.cut(target),
            "steal": lambda: world.steal(target),
            "damage": lambda: self.damage(target),
            "fail": lambda: network.fail(world, target),
            "quiesce": lambda: network.quiesce(world, target),
            "commit_twice": lambda: network.deliver_commit(world, number, keep=True),
            "abort": lambda: self._abort(target),
            "release": lambda: self._release(target, index),
            "time": lambda: world.advance((0.05, 0.1, 0.34, 0.5)[index % 4] * LEASE_S),
            "lonely_time": lambda: world.advance((0.05, 0.34, 0.5, 1.1)[index % 4] * LEASE_S, hears=False),
            "router_renews": lambda: world.renew_at_destination(JourneyKey(target, self.attempts[target])),
            "stranger": lambda: target.add_stranger(world.new_name(), 1 + index % 5),
            "strangers_leave": lambda: [target.end_stranger(name) for name in list(target.strangers)],
            "source_dies": lambda: world.restart_source(number),
            "destination_dies": lambda: world.restart_destination(number),
        }

    def _place_new(self, index: int) -> None:
        world = self.world
        if sum(destination.book.num_leases for destination in world.destinations) >= MAX_LIVE:
            return
        like = [key.journey_id for d in world.destinations for key in d.running] if index % 3 == 0 else []
        journey = world.new_journey(1 + index % MAX_TOKENS, like[0] if like else None)
        self._place(JourneyKey(journey, 1), index, index // 2 % 2)

    def _place_again(self, key: JourneyKey, index: int) -> None:
        """The next attempt, at the same destination."""
        number = next(n for n, side in enumerate(self.world.destinations) if side.book.get(key) is not None)
        self._place(JourneyKey(key.journey_id, key.attempt + 1), index, number)

    def _place(self, key: JourneyKey, index: int, destination: int) -> None:
        self.attempts[key.journey_id] = max(key.attempt, self.attempts.get(key.journey_id, 0))
        lease = self.world.reserve(key, destination, index // 4 % 3)
        if lease is not None and self.world.begin(key, index % 2) is not None:
            self.world.pull(key)

    def _repeat_old_calls(self, journey: str, index: int) -> None:
        """Late duplicates of the router's calls."""
        key = JourneyKey(journey, max(1, self.attempts[journey] - index % 3))
        known = self.world.leases.get(key)
        if known is not None and known[0] in self.world.destinations:
            again = self.world.reserve(key, self.world.destinations.index(known[0]))
            assert again is None or again is known[1], f"{key}: a repeated reserve gave another lease"
        self.world.pull(key)
        self.world.begin(key, index % 2)

    def _keep(self, source: Source, index: int) -> None:
        """A prompt of its own, or one that is under way somewhere."""
        known = list(self.world.prompts.values()) if index % 2 else []
        if known:
            prompt = known[index % len(known)]
        else:
            prompt = self.world.prompts[self.world.new_journey(1 + index % MAX_TOKENS)]
        prefixes.keep(self.world, source, prompt)

    def _hold(self, source: Source, prompt: Prompt, index: int) -> None:
        world = self.world
        live = sum(destination.book.num_leases for destination in world.destinations)
        if live < MAX_LIVE:
            key = prefixes.hold(world, source, prompt, world.destinations[index % 2])
            if key is not None:
                self.attempts[key.journey_id] = 1

    def _abort(self, key: JourneyKey) -> None:
        """The client has gone: both sides hear of it."""
        for number in range(2):
            self.world.release(key.journey_id, key.attempt, at_source=number, at_destination=number)

    def _release(self, journey: str, index: int) -> None:
        """One of the two sides hears of it, perhaps of an older or a later attempt."""
        up_to = max(1, self.attempts[journey] + index % 3 - 1)
        self.attempts[journey] = max(self.attempts[journey], up_to)
        side = index // 4 % 2
        if index // 8 % 2:
            self.world.release(journey, up_to, at_source=side)
        else:
            self.world.release(journey, up_to, at_destination=side)


