"""What goes wrong in one world, decided beforehand from its seed: when, where, for how long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

FIRST_S, LAST_S = 0.2, 4.0
LOST_ROUTER_S = 1.2, 3.0
DRAIN_S = 5.0
MAX_FAULTS = 6
ROUTER_SHARE = 0.3  # of the processes that are killed or stopped, where there is a router to spare


class FaultName(Enum):
    CRASH = "is killed"
    STOP = "is stopped"
    CUT = "is cut off"
    SLOW = "has a slow network"
    LOST_REPLIES = "loses replies"
    DUPLICATES = "hears calls twice"
    BAD_FETCHES = "has bad fetches"
    DRAIN = "is told to end, and is gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """One fault.

    Attributes:
        target: name of a process.
        other: of the one that it is cut off from; empty: from all.
        seconds: until it is over: a killed process is started anew then.
    """

    at_s: float
    name: FaultName
    target: str
    seconds: float
    other: str = ""

    @property
    def end_s(self) -> float:
        return self.at_s + self.seconds + (DRAIN_S if self.name is FaultName.DRAIN else 0.0)

    def __str__(self) -> str:
        where = f" from {self.other or 'all'}" if self.name is FaultName.CUT else ""
        return f"{self.target} {self.name.value}{where} for {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class _Kind:
    """`weight`: how often, beside the others; `seconds`: how long, at least and at most."""

    weight: int
    seconds: tuple[float, float]


_KINDS = {
    FaultName.CRASH: _Kind(4, (0.05, 3.0)),
    FaultName.STOP: _Kind(3, (0.1, 5.0)),
    FaultName.CUT: _Kind(4, (0.1, 6.0)),
    FaultName.SLOW: _Kind(3, (0.5, 3.0)),
    FaultName.LOST_REPLIES: _Kind(3, (0.5, 3.0)),
    FaultName.DUPLICATES: _Kind(3, (0.5, 4.0)),
    FaultName.BAD_FETCHES: _Kind(4, (0.5, 4.0)),
}


def plan_faults(chance: random.Random, *, workers: Sequence[str], routers: Sequence[str]) -> list[Trouble]:
    """By time. Every world has its own number of them, some none at all.

    One router at least is left alone, as is what stands between it and clients.
    """
    plan = []
    for _ in range(chance.randint(0, MAX_FAULTS)):
        names = list(_KINDS)
        name = chance.choices(names, [_KINDS[each].weight for each in names])[0]
        targets = list(workers)
        if name in (FaultName.CRASH, FaultName.STOP):
            targets = list(routers[1:]) if routers[1:] and chance.random() < ROUTER_SHARE else targets
        elif name is FaultName.BAD_FETCHES:
            targets = [each for each in workers if each.startswith("decode")]
        target = chance.choice(targets)
        others = [each for each in (*workers, *routers) if each != target]
        plan.append(
            Trouble(
                at_s=chance.uniform(FIRST_S, LAST_S), name=name, target=target,
                seconds=chance.uniform(*_KINDS[name].seconds),
                other=chance.choice(["", *others]) if name is FaultName.CUT else "",
            )
        )
    return sorted(plan, key=lambda trouble: trouble.at_s)


def bad_fetches(decode_workers: Sequence[str]) -> list[Trouble]:
    """All the time that requests come: what is given up goes on, often into what others have by then."""
    return [
        Trouble(at_s=0.0, name=FaultName.BAD_FETCHES, target=name, seconds=LAST_S) for name in decode_workers
    ]


def lost_router(chance: random.Random, router: str) -> Trouble:
    """It is killed amid choices of its own."""
    return Trouble(
        at_s=chance.uniform(*LOST_ROUTER_S), name=FaultName.CRASH, target=router,
        seconds=chance.uniform(*_KINDS[FaultName.CRASH].seconds),
    )


def drained_worker(chance: random.Random, workers: Sequence[str]) -> Trouble:
    """It is told to end, as in a rolling restart: what it has begun may end there, within `DRAIN_S`."""
    return Trouble(
        at_s=chance.uniform(FIRST_S, LAST_S), name=FaultName.DRAIN, target=chance.choice(workers),
        seconds=chance.uniform(*_KINDS[FaultName.CRASH].seconds),
    )
