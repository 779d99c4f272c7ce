"""The router of a simulation: its own classes decide who is let in, who waits, and where each goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pd_engine.errors import PdRelayError, ResourceExhausted
from pd_ops.sizing.outcome import Traveller
from pd_ops.sizing.pools import Pools
from pd_router.admission import Admission, AdmissionLimits
from pd_router.costs import num_expected_tokens
from pd_router.placement import Placement
from pd_router.pools import PlacementRequest, Snapshot, WorkerView
from pd_router.prefix_index import PrefixIndex
from pd_router.targets import Targets
from pd_router.waiting_line import Waiter

Views = Callable[[], tuple[WorkerView, ...]]
At = Callable[[float, Callable[[float], None]], None]


class Front:
    """Args:
    prefill, decode: what each pool looks like now.
    at: has something happen at a time.
    placed: is given whom it has let in, and where to; before the next snapshot is made.
    refused: is told that one has ended without having been served to its end.
    """

    def __init__(
        self, pools: Pools, index: PrefixIndex, *, prefill: Views, decode: Views, at: At,
        placed: Callable[[Traveller, Placement, float], None], refused: Callable[[], None],
    ) -> None:
        self._pools = pools
        self._index = index
        self._prefill = prefill
        self._decode = decode
        self._at = at
        self._placed = placed
        self._refused = refused
        self._waiting: dict[Waiter, Traveller] = {}
        self._admission = Admission(AdmissionLimits(
            max_running=pools.max_running, max_waiting=pools.max_waiting, max_queued_ms=pools.max_queued_ms
        ))

    @property
    def has_line(self) -> bool:
        return bool(self._waiting)

    @property
    def num_running(self) -> int:
        return self._admission.num_running

    def ask(self, traveller: Traveller, now_s: float, *, is_again: bool) -> None:
        pools = self._pools
        wanted = self._wanted(traveller)
        waiter = Waiter(num_tokens=wanted.num_tokens + num_expected_tokens(wanted), is_again=is_again)
        targets = None if is_again or not pools.refuses else Targets(
            begun_s=traveller.arrival_s, ttft_ms=pools.ttft_target_ms, itl_ms=pools.itl_target_ms
        )
        traveller.wanted, traveller.targets = wanted, targets
        try:
            arrival = self._admission.arrive(
                waiter, wanted, self._snapshot(wanted), targets, now_s, may_recover=True
            )
        except PdRelayError as error:
            self._refuse(traveller, error, had_seat=is_again)
            return
        if arrival.displaced is not None:
            self._refuse(self._waiting.pop(arrival.displaced), None, had_seat=False)
        if arrival.placement is not None:
            self._placed(traveller, arrival.placement, now_s)
            return
        self._waiting[waiter] = traveller
        if targets is not None and targets.ttft_ms is not None:
            self._at(traveller.arrival_s + targets.ttft_ms / 1e3, partial(self._overdue, waiter))

    def _wanted(self, traveller: Traveller) -> PlacementRequest:
        size = self._pools.block_size
        num_blocks = -(-traveller.num_slots // size)
        num_tokens = traveller.prompt.num_tokens
        return PlacementRequest(
            num_tokens=num_tokens, num_prefill_blocks=-(-num_tokens // size), num_output_tokens=traveller.num_left,
            num_decode_blocks=0 if traveller.num_left <= 1 else num_blocks,
            num_decode_blocks_at_most=0 if traveller.num_left <= 1 else num_blocks, block_size=size,
            block_hashes=traveller.prompt.hashes, num_local_tokens=self._pools.local_tokens,
        )

    def _snapshot(self, wanted: PlacementRequest) -> Snapshot:
        return Snapshot(
            prefill=self._prefill(), decode=self._decode(),
            held=self._index.held(wanted.block_hashes) if wanted.block_hashes else {},
            prefill_is_measured=True, itl_is_measured=True,
        )

    def turns(self, now_s: float) -> None:
        while (head := self._admission.line.head) is not None:
            traveller = self._waiting[head]
            assert traveller.wanted is not None
            try:
                placement = self._admission.turn(
                    head, traveller.wanted, self._snapshot(traveller.wanted), traveller.targets, now_s, may_recover=True
                )
            except PdRelayError as error:
                self._leave(head, error)
                continue
            if placement is None:
                return
            del self._waiting[head]
            self._placed(traveller, placement, now_s)

    def _overdue(self, waiter: Waiter, now_s: float) -> None:
        if waiter in self._waiting:
            self._leave(waiter, None)

    def _leave(self, waiter: Waiter, error: PdRelayError | None) -> None:
        self._admission.leave(waiter)
        self._refuse(self._waiting.pop(waiter), error, had_seat=waiter.is_again)

    def _refuse(self, traveller: Traveller, error: PdRelayError | None, *, had_seat: bool) -> None:
        """`error` None: it waited in vain."""
        is_refusal = error is None or isinstance(error, ResourceExhausted)
        traveller.ending = "refused" if is_refusal and not had_seat else "failed"
        if had_seat:
            self._admission.free_seat()
        self._refused()

    def end(self) -> None:
        """One that was let in has ended."""
        self._admission.free_seat()
