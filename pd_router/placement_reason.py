"""What decided a placement, in a word: few enough to be a label of a metric. Pure."""

from __future__ import annotations

from enum import Enum

from pd_router.placement import Placement, PrefillKind


class Reason(Enum):
    """Of who computes the prompt."""

    NAMED = "named"  # the request names the worker
    DEGRADED = "degraded"  # a decode worker, as no prefill worker is ready that has not failed it
    SHORT_REST = "short_rest"  # a decode worker has all but a short rest of it cached
    FETCHED = "fetched"  # the worker takes its beginning from another one's cache
    CACHED = "cached"  # the worker has its beginning cached
    IDLEST = "idlest"  # nobody has anything of it: who would be done first


def reason_of(placement: Placement) -> Reason:
    """Of the prefill worker, or of the decode worker with local prefill."""
    if placement.request.pinned_prefill:
        return Reason.NAMED
    if placement.kind is PrefillKind.LOCAL:
        dying = placement.request.dying
        has_prefill = any(worker.ready and worker.worker_id not in dying for worker in placement.snapshot.prefill)
        return Reason.SHORT_REST if has_prefill else Reason.DEGRADED
    if placement.prefix is not None:
        return Reason.FETCHED
    return Reason.CACHED if placement.snapshot.held.get(placement.prefill_worker) else Reason.IDLEST
