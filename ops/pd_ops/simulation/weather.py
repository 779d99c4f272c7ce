"""How long things take and what goes wrong by chance, from seeded random numbers: calm, until faults say otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.transports.loopback import Fault, FaultKind
from pd_ops.simulation.network import Call
from pd_ops.simulation.process import Process
from pd_ops.simulation.transfers import FetchFaults

LATENCY_S = (0.0002, 0.003)
SLOW_MESSAGE_SHARE = 0.02
STEP_S = (0.004, 0.03)
SLOW_STEP_SHARE = 0.03
SLOW_STEP = 25     # times as long
LONG_STEP_S = (0.06, 0.25)  # of a world of long steps, in which a prompt takes longer than a lease
HOP_S = (0.00005, 0.002)
AGAIN_S = (0.001, 3.0)
SLOW_S = (0.05, 1.5)
STALL_S = (0.2, 2.0)  # many go on after they were given up, and before they are called off
LONGEST_FETCH_BYTES = 512
FETCH_FAULTS = {  # how often, beside the others
    FaultKind.DELAY: 1, FaultKind.STALL: 3, FaultKind.DROP: 1, FaultKind.REORDER: 1, FaultKind.CORRUPT: 3,
    FaultKind.KILL: 1,
}


@dataclass(kw_only=True, slots=True)
class Front:
    """A stretch of bad weather at one process: shares of the messages or calls that it strikes.

    Attributes:
        slow: messages that take `SLOW_S`.
        lost: calls whose reply is lost.
        doubled: calls that arrive again.
    """

    slow: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0


@dataclass(kw_only=True, slots=True)
class SeededWeather:
    """Attributes:
    fronts: by name of the process that they stand at.
    """

    random: random.Random
    fronts: dict[str, Front] = field(default_factory=dict)

    def latency_s(self, sender: Process, receiver: Process) -> float:
        fronts, slow = self.fronts, 0.0
        if fronts:
            slow = max((fronts[p.name].slow for p in (sender, receiver) if p.name in fronts), default=0.0)
        if slow and self.random.random() < slow:
            return self.random.uniform(*SLOW_S)
        latency_s = self.random.uniform(*LATENCY_S)
        return latency_s * 20 if self.random.random() < SLOW_MESSAGE_SHARE else latency_s

    def duplicate_after_s(self, call: Call) -> float | None:
        if call.is_stream or self.random.random() >= self._share(call, "doubled"):
            return None
        return self.random.uniform(*AGAIN_S)

    def loses_reply(self, call: Call) -> bool:
        return not call.is_stream and self.random.random() < self._share(call, "lost")

    def survives_its_caller(self, call: Call) -> bool:
        return self.random.random() < 0.5

    def _share(self, call: Call, name: str) -> float:
        assert call.connection is not None
        share: float = max(
            (getattr(self.fronts[p.name], name) for p in (call.connection.client, call.connection.server)
             if p.name in self.fronts), default=0.0,
        )
        return share


class SeededPace:
    """Of one process. `has_long_steps`: all are alike, and long."""

    def __init__(self, chance: random.Random, *, has_long_steps: bool) -> None:
        self._random = chance
        self._has_long_steps = has_long_steps
        self._speed = chance.choice((0.5, 1.0, 1.0, 2.0))
        self._step_s = 0.0
        self._worked_s = 0.0

    def step_s(self) -> float:
        if self._has_long_steps:
            self._step_s = self._random.uniform(*LONG_STEP_S)
            return self._step_s
        self._step_s = self._random.uniform(*STEP_S) * self._speed
        if self._random.random() < SLOW_STEP_SHARE:
            self._step_s *= SLOW_STEP
        return self._step_s

    def hop_s(self) -> float:
        return self._random.uniform(*HOP_S)

    def worked_s(self) -> float:
        return self._worked_s

    def note_step(self) -> None:
        self._worked_s += self._step_s


def fetch_faults(chance: random.Random, share: Callable[[], float]) -> FetchFaults:
    """Of one worker. `share`: of fetches that something happens to, now."""

    def draw() -> Fault:
        if chance.random() >= share():
            return Fault(kind=FaultKind.NONE)
        kind = chance.choices(list(FETCH_FAULTS), list(FETCH_FAULTS.values()))[0]
        return Fault(kind=kind, at_byte=chance.randrange(LONGEST_FETCH_BYTES))

    return FetchFaults(draw, lambda: chance.uniform(*STALL_S))
