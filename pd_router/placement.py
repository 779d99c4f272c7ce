"""Which workers run an attempt: a pure function of the request and a snapshot of both pools.

The cheapest of each pool that has room, in milliseconds (`pd_router.costs`); of equals the one with more free blocks,
then the first by name. The two are chosen apart: what moves between them is charged to the decode worker.

Local prefill, where the decode worker computes the prompt itself, is taken
- for a short rest of a prompt whose beginning it has cached, or fetches from who has it, where that costs less than the
  pair (`num_local_tokens`);
- for every prompt while no prefill worker is ready, and for one that every one that is has just failed (`may_degrade`);
- where the request names a decode worker to compute its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from pd_router import costs
from pd_router.pools import PlacementRequest, PrefixOffer, Snapshot, WorkerView
from pd_router.prefix_offer import best_offer


class Exclusion(Enum):
    """Why a candidate was not considered."""

    PINNED_ELSEWHERE = "the request names another worker"
    ENDED = "its process has ended"
    NOT_READY = "not ready"
    TOO_SMALL = "can never hold it"
    NO_ROOM = "no room now"
    AVOIDED = "failed this journey before"
    NOT_PREFERRED = "another one holds verified blocks of this journey"
    TOO_LATE = "its first token would come too late"
    TOO_SLOW_NOW = "tokens would come too slowly with so many sequences"
    TOO_SLOW = "tokens would come too slowly even to it alone"
    TOO_LITTLE_CACHED = "has too little of the prompt cached"


class RefusalKind(Enum):
    NONE_LEFT = "no worker is left"
    NO_WORKER = "no worker is ready"
    NO_ROOM = "no worker has room now"
    NEVER = "no worker can ever hold it"
    TOO_SLOW = "no worker is fast enough"
    UNKNOWN = "there is no such worker"


class PrefillKind(Enum):
    """Where the prompt is computed."""

    REMOTE = "remote"  # at a prefill worker
    LOCAL = "local"  # at the decode worker, without a handoff


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """`role` is the pool that cannot take it, or "local" where a decode worker is to compute the prompt; `request` and
    `snapshot` are what it was decided from."""

    role: str
    kind: RefusalKind
    request: PlacementRequest
    snapshot: Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Attributes:
    prefill_worker: computes the prompt; the decode worker itself if `kind` is LOCAL.
    decode_worker: None if prefill samples the only token that is left.
    ttft_ms: until the first token is there, as estimated.
    cost_ms: what `pd_router.costs` counts, without the delay of others at the prefill worker.
    request, snapshot: what it was decided from; `pd_router.explanation` shows how.
    prefix: leading blocks for who computes the prompt to fetch, those that it holds included; None: it fetches nothing.
    """

    kind: PrefillKind
    prefill_worker: str
    decode_worker: str | None
    ttft_ms: float
    cost_ms: float
    request: PlacementRequest
    snapshot: Snapshot
    prefix: PrefixOffer | None = None


def place(request: PlacementRequest, snapshot: Snapshot) -> Placement | Refusal:
    """Where one attempt is to run, or why it cannot."""
    if request.num_own_blocks:
        snapshot = _with_own_blocks(request, snapshot)
    if is_local_only(request, snapshot):
        return _local_placement(request, snapshot) or _local_refusal(request, snapshot)
    decode: str | None = None
    decode_ms = 0.0
    if _has_no_prefill(snapshot) and not request.may_degrade:
        return _refusal("prefill", request, snapshot)
    if request.num_decode_blocks:
        usable = usable_decode(request, snapshot)
        if not usable:
            return _refusal("decode", request, snapshot)
        chosen, decode_ms = _cheapest(usable, costs.decode_ms(usable, request, snapshot.held))
        decode = chosen.worker_id
    usable = usable_prefill(request, snapshot)
    if not usable:
        return _refusal("prefill", request, snapshot)
    offer = best_offer(request, snapshot)
    chosen, _ = _cheapest(usable, costs.prefill_ms(usable, request, snapshot.held, offer))
    num_held = snapshot.held.get(chosen.worker_id, 0)
    ttft_ms = costs.first_token_ms(chosen, request, num_held, offer)
    local = _local_placement(request, snapshot)
    if local is not None and local.cost_ms < ttft_ms + decode_ms:
        return local
    return Placement(
        kind=PrefillKind.REMOTE,
        prefill_worker=chosen.worker_id,
        decode_worker=decode,
        ttft_ms=ttft_ms,
        cost_ms=ttft_ms + decode_ms,
        request=request,
        snapshot=snapshot,
        prefix=offer if costs.num_blocks_at_prefill(chosen, request, num_held, offer) > num_held else None,
    )


def _with_own_blocks(request: PlacementRequest, snapshot: Snapshot) -> Snapshot:
    """As the journey's next attempt finds it: what the last one has left is free for it, and waits for nobody."""
    decode = tuple(
        replace(worker, has_room=True, num_blocks_free=worker.num_blocks_free + request.num_own_blocks)
        if worker.worker_id == request.preferred_decode and not worker.has_refused else worker
        for worker in snapshot.decode
    )
    return replace(snapshot, decode=decode)


def usable_prefill(request: PlacementRequest, snapshot: Snapshot) -> list[WorkerView]:
    """Those that can take it, without those that failed it or would be late, unless nobody else is there."""
    usable = _usable(snapshot.prefill, request.num_prefill_blocks, request.pinned_prefill, request.avoided)
    within_ms = request.first_token_within_ms
    if within_ms is None:
        return usable
    held, offer = snapshot.held.get, best_offer(request, snapshot)
    return [
        worker
        for worker in usable
        if costs.first_token_ms(worker, request, held(worker.worker_id, 0), offer) <= within_ms
    ] or usable


def usable_decode(request: PlacementRequest, snapshot: Snapshot) -> list[WorkerView]:
    """Those that can take it, without those that failed it unless nobody else is there; only the one that holds
    verified blocks of the journey if it is among them."""
    return _usable_decode(request, snapshot.decode, request.num_decode_blocks)


def usable_local(request: PlacementRequest, snapshot: Snapshot) -> list[WorkerView]:
    """Decode workers that can take it with its prompt, which they offer to compute, and are allowed to."""
    offering = offering_local(snapshot)
    if is_local_only(request, snapshot):
        pinned = request.pinned_prefill
        offering = [worker for worker in offering if pinned in ("", worker.worker_id)]
    elif request.pinned_prefill or not request.num_decode_blocks:
        return []
    else:
        held, offer = snapshot.held.get, best_offer(request, snapshot)
        offering = [
            worker
            for worker in offering
            for num_had in (costs.num_blocks_at_local(worker, request, held(worker.worker_id, 0), offer),)
            if num_had and costs.num_uncached_tokens(request, num_had) <= request.num_local_tokens
        ]
    return _usable_decode(request, offering, request.num_local_blocks)


def offering_local(snapshot: Snapshot) -> list[WorkerView]:
    """Decode workers that compute prompts themselves if asked to."""
    return [worker for worker in snapshot.decode if worker.local_prefill_ms_per_token is not None]


def _has_no_prefill(snapshot: Snapshot) -> bool:
    return not any(worker.ready and worker.expected for worker in snapshot.prefill)


def is_local_only(request: PlacementRequest, snapshot: Snapshot) -> bool:
    """Whether nobody but a decode worker may compute the prompt: one is named, or no prefill worker is left that
    has not failed it."""
    offering = offering_local(snapshot)
    if request.pinned_prefill:
        return any(worker.worker_id == request.pinned_prefill for worker in offering)
    if not request.may_degrade or not offering:
        return False
    return _has_no_prefill(snapshot) or (
        bool(request.dying) and _has_failed_everywhere(request, snapshot)
        and bool(_usable_decode(request, offering, request.num_local_blocks))
    )


def _has_failed_everywhere(request: PlacementRequest, snapshot: Snapshot) -> bool:
    """One that dies may seem ready for a moment: attempts are not spent on it where a decode worker can do its work."""
    return all(worker.worker_id in request.dying for worker in snapshot.prefill if worker.ready and worker.expected)


def _usable_decode(request: PlacementRequest, pool: Sequence[WorkerView], num_blocks: int) -> list[WorkerView]:
    within_ms = request.itl_within_ms
    if within_ms is not None:  # as `pace_exclusion`, which would cost a call a worker
        pool = [worker for worker in pool if worker.itl_limit_ms >= worker.next_itl_ms <= within_ms]
    usable = _usable(
        pool, num_blocks, request.pinned_decode, request.avoided, request.num_decode_blocks_at_most
    )
    if request.preferred_decode:
        return [worker for worker in usable if worker.worker_id == request.preferred_decode] or usable
    return usable


def exclusion(worker: WorkerView, pinned: str, num_blocks: int, num_blocks_at_most: int = 0) -> Exclusion | None:
    """Why this worker cannot take a request that may name a worker, with so many blocks now and later; None: it can."""
    if pinned and worker.worker_id != pinned:
        return Exclusion.PINNED_ELSEWHERE
    if not worker.expected:
        return Exclusion.ENDED
    if not worker.ready:
        return Exclusion.NOT_READY
    if max(num_blocks, num_blocks_at_most) > worker.num_blocks_total:
        return Exclusion.TOO_SMALL
    if not worker.has_room or num_blocks > worker.num_blocks_free:
        return Exclusion.NO_ROOM
    return None


def pace_exclusion(worker: WorkerView, itl_within_ms: float | None) -> Exclusion | None:
    """Why tokens would come too slowly at a decode worker, to this request or to those that are there."""
    if itl_within_ms is None or worker.next_itl_ms <= min(itl_within_ms, worker.itl_limit_ms):
        return None
    return Exclusion.TOO_SLOW if worker.alone_itl_ms > itl_within_ms else Exclusion.TOO_SLOW_NOW


def _usable(
    pool: Sequence[WorkerView], num_blocks: int, pinned: str, avoided: frozenset[str], num_blocks_at_most: int = 0
) -> list[WorkerView]:
    usable = [
        worker
        for worker in pool
        if worker.ready and worker.has_room and num_blocks <= worker.num_blocks_free and worker.expected
        and num_blocks_at_most <= worker.num_blocks_total
    ]
    if pinned:
        usable = [worker for worker in usable if worker.worker_id == pinned]
    if avoided:
        usable = [worker for worker in usable if worker.worker_id not in avoided] or usable
    return usable


def _cheapest(workers: Sequence[WorkerView], costs_ms: Sequence[float]) -> tuple[WorkerView, float]:
    least_ms = min(costs_ms)
    if costs_ms.count(least_ms) == 1:
        return workers[costs_ms.index(least_ms)], least_ms
    equals = [worker for worker, cost_ms in zip(workers, costs_ms, strict=True) if cost_ms == least_ms]
    return min(equals, key=lambda worker: (-worker.num_blocks_free, worker.worker_id)), least_ms


def _local_placement(request: PlacementRequest, snapshot: Snapshot) -> Placement | None:
    usable = usable_local(request, snapshot)
    if not usable:
        return None
    held, offer = snapshot.held.get, best_offer(request, snapshot)
    terms = [costs.local_terms(worker, request, held(worker.worker_id, 0), offer=offer) for worker in usable]
    chosen, cost_ms = _cheapest(usable, [sum(each.values()) for each in terms])
    chosen_terms = terms[usable.index(chosen)]
    return Placement(
        kind=PrefillKind.LOCAL,
        prefill_worker=chosen.worker_id,
        decode_worker=chosen.worker_id,
        ttft_ms=chosen_terms["queue"] + chosen_terms.get("fetch", 0.0) + chosen_terms["compute"],
        cost_ms=cost_ms,
        request=request,
        snapshot=snapshot,
        prefix=offer if "fetch" in chosen_terms else None,
    )


def _refusal(role: str, request: PlacementRequest, snapshot: Snapshot) -> Refusal:
    if role == "decode":
        kind = _refusal_kind(
            snapshot.decode, request.pinned_decode, request.num_decode_blocks, request.num_decode_blocks_at_most,
            request.itl_within_ms,
        )
    else:
        kind = _refusal_kind(snapshot.prefill, request.pinned_prefill, request.num_prefill_blocks)
    return Refusal(role=role, kind=kind, request=request, snapshot=snapshot)


def _local_refusal(request: PlacementRequest, snapshot: Snapshot) -> Refusal:
    pinned = request.pinned_prefill or request.pinned_decode
    kind = _refusal_kind(
        offering_local(snapshot), pinned, request.num_local_blocks, request.num_decode_blocks_at_most,
        request.itl_within_ms,
    )
    return Refusal(role="local", kind=kind, request=request, snapshot=snapshot)


def _refusal_kind(
    pool: Sequence[WorkerView], pinned: str, num_blocks: int, num_blocks_at_most: int = 0,
    itl_within_ms: float | None = None,
) -> RefusalKind:
    reasons = {
        exclusion(worker, pinned, num_blocks, num_blocks_at_most) or pace_exclusion(worker, itl_within_ms)
        for worker in pool
    }
    if reasons <= {Exclusion.ENDED, Exclusion.PINNED_ELSEWHERE} and reasons != {Exclusion.PINNED_ELSEWHERE}:
        return RefusalKind.NONE_LEFT
    if reasons & {Exclusion.NO_ROOM, Exclusion.TOO_SLOW_NOW}:
        return RefusalKind.NO_ROOM
    if Exclusion.NOT_READY not in reasons and Exclusion.TOO_SMALL in reasons:
        return RefusalKind.NEVER
    if Exclusion.NOT_READY not in reasons and Exclusion.TOO_SLOW in reasons:
        return RefusalKind.TOO_SLOW
    if reasons == {Exclusion.PINNED_ELSEWHERE}:
        return RefusalKind.UNKNOWN
    return RefusalKind.NO_WORKER
