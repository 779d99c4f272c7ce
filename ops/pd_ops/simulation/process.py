"""One life of a simulated process: what runs in its context stops when it is stopped, and never runs again when it is
killed."""

from __future__ import annotations

import math
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_ops.simulation.loop import Event


@dataclass(kw_only=True, slots=True, eq=False)
class Process:
    """Attributes:
    name: of the process; the next life has the same.
    life: 1 for the first one.
    clock_offset_s, clock_rate: of its monotonic clock, which begins anywhere and runs a little fast or slow.
    is_stopped: nothing of it runs until it goes on.
    went_on_s: when it last did, by the world's clock.
    backlog: what would have run if it had not been stopped or killed, in order.
    """

    name: str
    life: int
    clock_offset_s: float
    clock_rate: float
    is_alive: bool = True
    is_stopped: bool = False
    went_on_s: float = -math.inf
    backlog: list[Event] = field(default_factory=list)
    _context: Context | None = None

    @property
    def is_running(self) -> bool:
        return self.is_alive and not self.is_stopped

    @property
    def label(self) -> str:
        return self.name if self.life == 1 else f"{self.name}#{self.life}"

    def local_s(self, world_s: float) -> float:
        return self.clock_offset_s + world_s * self.clock_rate

    def world_s(self, local_s: float) -> float:
        return (local_s - self.clock_offset_s) / self.clock_rate

    def context(self) -> Context:
        """For what is to run as a part of it; nothing of who asks for it is in there."""
        if self._context is None:
            self._context = Context()
            self._context.run(PROCESS.set, self)
        return self._context.copy()


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
