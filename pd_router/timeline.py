"""When what happened to one choice, in seconds of its router's clock. It has no clock, and nothing decides by it.

    begun .. placed .. reserved .. source known .. first token .. handed over .. tokens ... ended
             \\------------- an attempt; another one may follow from any point -------------/
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from pd_engine.contracts import worker_pb2 as pb


@dataclass(kw_only=True, slots=True)
class AttemptTimes:
    """One placement.

    Attributes:
        kind, reason: of the placement (`pd_router.placement_reason`).
        num_tokens_before: generated in earlier ones.
        reserved_s: a decode worker has granted its lease.
        source_s: the prefill worker has said where its blocks are.
        prefilled_s: the prompt was computed: its first token is here.
        handed_over_s: the decode worker has said that it has everything.
        prompt, handoff: as the workers tell it.
        failure, failed_s: why another one followed, or none could; empty and None if it ended the journey by itself.
    """

    number: int
    kind: str
    reason: str
    prefill_worker: str
    decode_worker: str
    placed_s: float
    num_tokens_before: int
    reserved_s: float | None = None
    source_s: float | None = None
    prefilled_s: float | None = None
    handed_over_s: float | None = None
    prompt: pb.PromptTimes | None = None
    handoff: pb.HandoffDone | None = None
    failure: str = ""
    failed_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Timeline:
    """Attributes:
    begun_s: it was let into the router, its prompt tokenized.
    attempts: in order.
    arrivals_s: of what came from workers, one or more tokens each.
    ended_s: None while it goes on.
    """

    begun_s: float
    attempts: list[AttemptTimes] = field(default_factory=list)
    arrivals_s: array[float] = field(default_factory=lambda: array("d"))
    ended_s: float | None = None

    def note_tokens(self, now_s: float) -> float | None:
        """Some came. Seconds since those before; None for the first."""
        arrivals_s = self.arrivals_s
        gap_s = now_s - arrivals_s[-1] if arrivals_s else None
        arrivals_s.append(now_s)
        return gap_s

    @property
    def first_token_s(self) -> float | None:
        """From the beginning; None before."""
        return self.arrivals_s[0] - self.begun_s if self.arrivals_s else None

    @property
    def queue_s(self) -> float | None:
        """In line for workers, before the first placement; None without one."""
        return self.attempts[0].placed_s - self.begun_s if self.attempts else None

    @property
    def prefill_s(self) -> float | None:
        """From the first placement to the first token; None without one."""
        return self.arrivals_s[0] - self.attempts[0].placed_s if self.arrivals_s and self.attempts else None

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last one; None without one."""
        return self.arrivals_s[-1] - self.arrivals_s[0] if self.arrivals_s else None
