"""Who is let in, and when: at once, after a wait in line, or not at all. Pure: the clock is an argument.

A request is refused before anybody works on it if the line is full, or if its first token would come too late: what
is ahead of it in line, at the pace at which the line has moved, then the queue at the prefill worker and its own
prompt, at measured speeds. A target for the time between tokens is a matter of room: a decode worker has none for a
request that would be too slow there, or would make another one too slow. What no worker can keep even alone is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_engine.errors import InvalidArgument, NotFound, PdRelayError, ResourceExhausted, Unavailable
from pd_engine.service.rates import Rate
from pd_router.explanation import explain
from pd_router.placement import Placement, PrefillKind, Refusal, RefusalKind, place, usable_prefill
from pd_router.pools import PlacementRequest, Snapshot, WorkerView
from pd_router.targets import MAX_RETRY_MS, Targets, bounded_ms, within_targets
from pd_router.waiting_line import Waiter, WaitingLine

NO_WORKER_RETRY_MS = 1_000
NUM_BEING_JUDGED = 64  # beyond those that run and wait: a full line must look at who comes, to be fair
_PACE_WEIGHT = 0.1  # of the newest in moving averages


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """Attributes:
    max_running: requests on workers at once.
    max_waiting: that wait in line.
    max_queued_ms: prompts are sent ahead while some prefill worker has no more than this waiting; others wait in line,
        where priority and tenant count.
    """

    max_running: int
    max_waiting: int
    max_queued_ms: float = math.inf


class Arrival(NamedTuple):
    """`placement` None: it waits. `displaced` has to go for it."""

    placement: Placement | None
    displaced: Waiter | None = None


class Admission:
    """Attributes:
    line: those that wait.
    num_running: journeys that are let in and have not ended.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.line = WaitingLine(max_waiting=limits.max_waiting)
        self.num_running = 0
        self._limits = limits
        self._pace = Rate(_PACE_WEIGHT)  # tokens of waiters
        self._last_turn_s = 0.0
        self._mean_duration_ms = 0.0

    def admit(self, num_in_system: int, num_more: int = 1) -> None:
        """To be asked before anything is known of a request, so that what is being judged has a bound too.

        Raises:
            ResourceExhausted: there are more than can run and wait.
        """
        if num_in_system + num_more > self._limits.max_running + self._limits.max_waiting + NUM_BEING_JUDGED:
            raise self.displacement()

    def arrive(
        self, waiter: Waiter, wanted: PlacementRequest, snapshot: Snapshot, targets: Targets | None, now_s: float,
        *, may_recover: bool = False,
    ) -> Arrival:
        """A journey is to be placed. The caller takes what it is given before the next snapshot is made.

        Args:
            waiter: one that was let in before finds a place in line in any case, and keeps the seat that it has; so
                does one whose request has begun, with a seat still to find.
            targets: None for one that has begun: it goes on, however late.
            may_recover: it may wait for a worker, not only for room.

        Raises:
            ResourceExhausted: it is refused, with a hint when that may have changed.
            Unavailable, InvalidArgument, NotFound: there is no such worker, now or ever.
        """
        decision = self._decide(wanted, snapshot, targets, now_s, may_recover=may_recover)
        in_line = self.line.num_again if waiter.is_again else len(self.line)
        if isinstance(decision, Placement):
            # To its own blocks it goes at once: it takes nobody's turn, and those before it may wait for what it has.
            takes_over = wanted.num_own_blocks > 0 and decision.decode_worker == wanted.preferred_decode
            if (takes_over or not in_line) and self._has_turn(waiter, decision):
                self._let_in(waiter)
                return Arrival(decision)
        self._check_wait(waiter, decision, targets, now_s)
        if not len(self.line):
            self._last_turn_s = now_s
        displaced = self.line.join(waiter)
        if displaced is waiter:
            raise self.displacement()
        return Arrival(None, displaced)

    def turn(
        self, waiter: Waiter, wanted: PlacementRequest, snapshot: Snapshot, targets: Targets | None, now_s: float,
        *, may_recover: bool = False,
    ) -> Placement | None:
        """For the head of the line: where it goes, or None if it is to wait on. Raises as `arrive`."""
        assert waiter is self.line.head, waiter
        decision = self._decide(wanted, snapshot, targets, now_s, may_recover=may_recover)
        if not isinstance(decision, Placement) or not self._has_turn(waiter, decision):
            return None
        self.line.serve(waiter)
        if not waiter.is_again:
            self._pace.add(waiter.num_tokens, now_s - self._last_turn_s)
            self._last_turn_s = now_s
        self._let_in(waiter)
        return decision

    def leave(self, waiter: Waiter) -> None:
        """It waits no more; nothing if it does not."""
        self.line.leave(waiter)

    def free_seat(self) -> None:
        """A journey that was let in has ended."""
        assert self.num_running > 0
        self.num_running -= 1

    def note_end(self, duration_ms: float) -> None:
        """A request took so long, let in or not."""
        weight = _PACE_WEIGHT if self._mean_duration_ms else 1.0
        self._mean_duration_ms += weight * (duration_ms - self._mean_duration_ms)

    def displacement(self) -> ResourceExhausted:
        """For one that has to go as the line is full."""
        return ResourceExhausted(
            f"{self.num_running} requests are running, {len(self.line)} wait; at most {self._limits.max_running} are "
            f"allowed at once, and {self._limits.max_waiting} may wait",
            retry_after_ms=bounded_ms(self._place_ms()),
        )

    @staticmethod
    def _decide(
        wanted: PlacementRequest, snapshot: Snapshot, targets: Targets | None, now_s: float, *, may_recover: bool
    ) -> Placement | Refusal:
        """A refusal that it returns may pass."""
        if targets is None:
            decision = place(wanted, snapshot)
        else:
            decision = place(within_targets(wanted, snapshot, targets, now_s), snapshot)
            if isinstance(decision, Placement) and snapshot.prefill_is_measured:
                targets.check_late(targets.late_ms(decision.ttft_ms, now_s))
        if isinstance(decision, Refusal) and not (
            decision.kind is RefusalKind.NO_ROOM or (decision.kind is RefusalKind.NO_WORKER and may_recover)
        ):
            raise refusal_error(decision)
        return decision

    def _check_wait(self, waiter: Waiter, decision: Placement | Refusal, targets: Targets | None, now_s: float) -> None:
        """Refuses what would be late after its wait in line."""
        if waiter.is_again or targets is None:
            return
        wait_ms = self._turn_ms(self.line.num_tokens_ahead(waiter) + waiter.num_tokens)
        ttft_ms = decision.ttft_ms if isinstance(decision, Placement) else 0.0
        targets.check_late(targets.late_ms(wait_ms + ttft_ms, now_s))

    def _has_turn(self, waiter: Waiter, placement: Placement) -> bool:
        if waiter.is_again:
            return True
        return self.num_running < self._limits.max_running and not self._is_backed_up(placement)

    def _is_backed_up(self, placement: Placement) -> bool:
        """Whether every prefill worker that could take it has enough to do."""
        if placement.kind is PrefillKind.LOCAL or not placement.snapshot.prefill_is_measured:
            return False
        usable = usable_prefill(placement.request, placement.snapshot)
        return least_queue_ms(usable) > self._limits.max_queued_ms

    def _let_in(self, waiter: Waiter) -> None:
        if not waiter.is_again:
            self.num_running += 1
            waiter.group.begin()

    def _turn_ms(self, num_tokens: float) -> float:
        """How long the line takes for so many, as it has moved so far; 0: not known."""
        pace = self._pace.value
        return 1000 * num_tokens / pace if pace > 0 else 0.0

    def _place_ms(self) -> float:
        """Until one that waits has its turn; where the line has not moved yet, until one that runs has ended."""
        if self._pace.value > 0 and len(self.line):
            return self._turn_ms(self.line.num_tokens / len(self.line))
        return self._mean_duration_ms / self._limits.max_running


def least_queue_ms(workers: Sequence[WorkerView]) -> float:
    """What a prompt waits at the prefill worker with the least to do."""
    return min((worker.num_queued_tokens * worker.prefill_ms_per_token for worker in workers), default=0.0)


def refusal_error(refusal: Refusal) -> PdRelayError:
    """What a client is told that is not kept waiting."""
    message = f"the request cannot be placed: {explain(refusal)}"
    match refusal.kind:
        case RefusalKind.NEVER:
            return InvalidArgument(f"the request can never be placed: {explain(refusal)}")
        case RefusalKind.UNKNOWN:
            return NotFound(message)
        case RefusalKind.TOO_SLOW:
            return ResourceExhausted(
                f"no worker keeps within {refusal.request.itl_within_ms:g} ms a token: {explain(refusal)}",
                retry_after_ms=MAX_RETRY_MS,
            )
        case _:
            return Unavailable(message, retry_after_ms=NO_WORKER_RETRY_MS)
