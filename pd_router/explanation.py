"""Why a request was placed where it was: every candidate with its costs, computed anew from what was decided on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pd_router import costs
from pd_router.placement import (
    Exclusion,
    Placement,
    PrefillKind,
    Refusal,
    exclusion,
    is_local_only,
    offering_local,
    pace_exclusion,
    usable_decode,
    usable_local,
    usable_prefill,
)
from pd_router.pools import PlacementRequest, Snapshot, WorkerView
from pd_router.prefix_offer import best_offer


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One worker as it was judged.

    Attributes:
        part: "prefill", "decode", or "local" for both at a decode worker.
        num_held_blocks: leading blocks of the prompt that it has cached.
        terms: by name, in milliseconds; empty if it is out.
        exclusion: why it is out, None if it is not.
    """

    part: str
    worker_id: str
    num_held_blocks: int
    terms: dict[str, float] = field(default_factory=dict)
    exclusion: Exclusion | None = None

    @property
    def cost_ms(self) -> float:
        return sum(self.terms.values())


def candidates(decision: Placement | Refusal) -> list[Candidate]:
    """All workers of both pools, in their order; the cheapest of each part is the one that was chosen."""
    return [
        _judge(worker, part, decision.request, decision.snapshot)
        for part in _parts(decision.request, decision.snapshot)
        for worker in part.pool
    ]


def chosen_workers(placement: Placement) -> dict[str, str]:
    """By part, who was chosen."""
    if placement.kind is PrefillKind.LOCAL:
        return {"local": placement.prefill_worker}
    chosen = {"prefill": placement.prefill_worker}
    return chosen if placement.decode_worker is None else {**chosen, "decode": placement.decode_worker}


def break_even_tokens(placement: Placement) -> float | None:
    """Uncached tokens up to which prefill at the chosen decode worker would be cheaper; None: it does not offer it."""
    if placement.kind is PrefillKind.LOCAL or placement.decode_worker is None:
        return None
    [prefill] = [w for w in placement.snapshot.prefill if w.worker_id == placement.prefill_worker]
    [decode] = [w for w in placement.snapshot.decode if w.worker_id == placement.decode_worker]
    return costs.break_even_tokens(prefill, decode)


def explain(decision: Placement | Refusal) -> str:
    """For people and logs: the outcome, then one line a pool with what everybody would have cost."""
    judged = candidates(decision)
    if isinstance(decision, Refusal):
        shown = "; ".join(_candidate_text(c) for c in judged if c.part == decision.role)
        return f"{decision.role}: {decision.kind.value} ({shown or 'none exists'})"
    chosen = chosen_workers(decision)
    lines = [f"{decision.kind.value} prefill, {decision.ttft_ms:.1f} ms to the first token"]
    if decision.prefix is not None:
        lines[0] += f", {decision.prefix.num_blocks} blocks from {decision.prefix.worker_id}"
    for part in dict.fromkeys(c.part for c in judged):
        shown = "; ".join(_candidate_text(c) for c in judged if c.part == part)
        lines.append(f"{part} {chosen.get(part, 'none')}: {shown}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A choice among workers. `usable`: ids of those that could take it."""

    name: str
    pool: Sequence[WorkerView]
    usable: frozenset[str]
    pinned: str
    num_blocks: int
    num_blocks_at_most: int
    terms: Callable[[WorkerView, PlacementRequest, int], dict[str, float]]


def _parts(request: PlacementRequest, snapshot: Snapshot) -> list[_Part]:
    usable = usable_prefill(request, snapshot)
    pool_queue_ms = costs.mean_queue_ms(usable) if usable else 0.0
    parts = [
        _Part(
            name="prefill", pool=snapshot.prefill, usable=_ids(usable), pinned=request.pinned_prefill,
            num_blocks=request.num_prefill_blocks, num_blocks_at_most=0,
            terms=partial(
                costs.prefill_terms, pool_queue_ms=pool_queue_ms, offer=best_offer(request, snapshot)
            ),
        )
    ]
    if request.num_decode_blocks:
        parts.append(
            _Part(
                name="decode", pool=snapshot.decode, usable=_ids(usable_decode(request, snapshot)),
                pinned=request.pinned_decode, num_blocks=request.num_decode_blocks,
                num_blocks_at_most=request.num_decode_blocks_at_most, terms=costs.decode_terms,
            )
        )
    only_local = is_local_only(request, snapshot)
    if request.num_decode_blocks or only_local:
        pinned = request.pinned_prefill if only_local else ""
        parts.append(
            _Part(
                name="local", pool=offering_local(snapshot), usable=_ids(usable_local(request, snapshot)),
                pinned=pinned or request.pinned_decode, num_blocks=request.num_local_blocks,
                num_blocks_at_most=request.num_decode_blocks_at_most,
                terms=partial(costs.local_terms, offer=best_offer(request, snapshot)),
            )
        )
    return parts


def _ids(workers: Sequence[WorkerView]) -> frozenset[str]:
    return frozenset(worker.worker_id for worker in workers)


def _judge(worker: WorkerView, part: _Part, request: PlacementRequest, snapshot: Snapshot) -> Candidate:
    num_held = snapshot.held.get(worker.worker_id, 0)
    if worker.worker_id in part.usable:
        terms, why = part.terms(worker, request, num_held), None
    else:
        out = exclusion(worker, part.pinned, part.num_blocks, part.num_blocks_at_most)
        terms, why = {}, out or _passed_over(worker, part, request)
    return Candidate(
        part=part.name, worker_id=worker.worker_id, num_held_blocks=num_held, terms=terms, exclusion=why
    )


def _passed_over(worker: WorkerView, part: _Part, request: PlacementRequest) -> Exclusion:
    """Why one that could take it was not considered."""
    if worker.worker_id in request.avoided:
        return Exclusion.AVOIDED
    if part.name == "prefill":
        return Exclusion.TOO_LATE
    if part.name == "local" and request.pinned_prefill:
        return Exclusion.PINNED_ELSEWHERE
    if (too_slow := pace_exclusion(worker, request.itl_within_ms)) is not None:
        return too_slow
    return Exclusion.TOO_LITTLE_CACHED if part.name == "local" else Exclusion.NOT_PREFERRED


def _candidate_text(candidate: Candidate) -> str:
    if candidate.exclusion is not None:
        return f"{candidate.worker_id}: {candidate.exclusion.value}"
    terms = " + ".join(f"{name} {ms:.1f}" for name, ms in candidate.terms.items())
    num_held = candidate.num_held_blocks
    held = f", {num_held} block{'s' if num_held > 1 else ''} cached" if num_held else ""
    return f"{candidate.worker_id}: {candidate.cost_ms:.1f} ms ({terms}{held})"
