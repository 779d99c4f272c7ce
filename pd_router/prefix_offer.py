"""Whose cached blocks the worker that computes a prompt may fetch. Pure."""

from __future__ import annotations

from pd_router.pools import PlacementRequest, PrefixOffer, Snapshot


def best_offer(request: PlacementRequest, snapshot: Snapshot) -> PrefixOffer | None:
    """The most leading blocks that a worker has which answers and has not failed this request; of equals the first by
    name. None: nobody has any, or workers do not fetch."""
    if not snapshot.held or not snapshot.can_fetch:
        return None
    ready = {worker.worker_id for pool in (snapshot.prefill, snapshot.decode) for worker in pool if worker.ready}
    offers = [
        (-num_blocks, worker_id)
        for worker_id, num_blocks in snapshot.held.items()
        if worker_id in ready and worker_id not in request.avoided
    ]
    if not offers:
        return None
    num_blocks, worker_id = min(offers)
    return PrefixOffer(worker_id=worker_id, num_blocks=-num_blocks)
