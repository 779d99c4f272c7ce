"""What a request is to keep within: its first token, and the time between its tokens. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pd_engine.errors import ResourceExhausted
from pd_router.pools import PlacementRequest, Snapshot

MIN_RETRY_MS = 100
MAX_RETRY_MS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What a request is to keep within, from `begun_s` on, of the caller's monotonic clock. None: there is no target.

    Attributes:
        ttft_ms: until its first token.
        itl_ms: between two tokens, on average.
    """

    begun_s: float
    ttft_ms: float | None = None
    itl_ms: float | None = None

    def late_ms(self, ttft_ms: float, now_s: float) -> float:
        """By how much a first token would be late that came after so long from now; not above 0: in time."""
        return -math.inf if self.ttft_ms is None else 1000 * (now_s - self.begun_s) + ttft_ms - self.ttft_ms

    def check_late(self, late_ms: float) -> None:
        """Raises:
        ResourceExhausted: a first token would be late by so much.
        """
        if late_ms > 0:
            raise ResourceExhausted(
                f"the first token would come after about {(self.ttft_ms or 0.0) + late_ms:.0f} ms; the target is "
                f"{self.ttft_ms:g} ms",
                retry_after_ms=bounded_ms(late_ms),
            )

    def missed(self) -> ResourceExhausted:
        """For a request that waited in vain."""
        assert self.ttft_ms is not None
        return ResourceExhausted(
            f"no worker has had room within {self.ttft_ms:g} ms, the target for the first token",
            retry_after_ms=bounded_ms(self.ttft_ms),
        )


def within_targets(
    wanted: PlacementRequest, snapshot: Snapshot, targets: Targets, now_s: float
) -> PlacementRequest:
    """What placement is to keep to. Nothing is kept out by speeds that nobody has measured."""
    first_token_within_ms = -targets.late_ms(0.0, now_s) if targets.ttft_ms is not None else None
    itl_within_ms = targets.itl_ms if targets.itl_ms is not None else math.inf
    return replace(
        wanted,
        first_token_within_ms=first_token_within_ms if snapshot.prefill_is_measured else None,
        itl_within_ms=itl_within_ms if snapshot.itl_is_measured else None,
    )


def bounded_ms(milliseconds: float) -> int:
    """A retry hint."""
    return round(min(max(milliseconds, MIN_RETRY_MS), MAX_RETRY_MS))
