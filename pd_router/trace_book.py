"""Traces that a router keeps: the last ones, and the slowest of the last hour. Bounded by number. Pure."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from pd_router.trace import Trace

SLOWEST_SHARE = 4  # of what is kept, one in so many are the slowest
SLOW_LIFE_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Kept:
    caller: str
    at_s: float
    trace: Trace


class TraceBook:
    """Args:
    num_kept: traces in all; 0: none.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_slowest = num_kept // SLOWEST_SHARE
        self._recent: deque[_Kept] = deque(maxlen=num_kept - self._num_slowest)
        self._slowest: list[_Kept] = []  # rising

    def add(self, caller: str, trace: Trace, now_s: float) -> None:
        """`caller`: whose it is; nobody else sees it."""
        kept = _Kept(caller, now_s, trace)
        self._recent.append(kept)
        self._slowest = [slow for slow in self._slowest if slow.at_s > now_s - SLOW_LIFE_S]
        insort(self._slowest, kept, key=lambda slow: slow.trace.total_ms)
        del self._slowest[: max(0, len(self._slowest) - self._num_slowest)]

    def of_request(self, caller: str, request_id: str) -> list[Trace]:
        """Of its choices, in their order; of a request that was sent several times, the last run."""
        found = {
            kept.trace.choice: kept.trace
            for kept in sorted([*self._slowest, *self._recent], key=lambda kept: kept.at_s)
            if kept.caller == caller and kept.trace.request_id == request_id
        }
        return [found[choice] for choice in sorted(found)]

    def slowest(self, caller: str, num_wanted: int) -> list[Trace]:
        """By their whole time, the slowest first."""
        known = {id(kept.trace): kept for kept in [*self._slowest, *self._recent] if kept.caller == caller}
        ordered = sorted(known.values(), key=lambda kept: kept.trace.total_ms, reverse=True)
        return [kept.trace for kept in ordered[:num_wanted]]
