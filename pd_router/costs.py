"""What a placement costs, in milliseconds of this request's time or of others'. Decision 0163 has the reasons.

At a prefill worker   queue    what waits there already has to be computed first
                      fetch    cached blocks of another worker, where that is quicker than to compute them
                      compute  the prompt beyond its cached and fetched blocks, at least one token
                      delay    what that costs those who come after: the share of the prompt that is not cached there,
                               times what prompts wait at present in this pool
At a decode worker    move     the cache of the prompt beyond the blocks that it holds
                      stay     the tokens to generate, at the pace of its batch with this sequence in it
                      hold     what the blocks it takes cost those who come after: the share of the free ones that it
                               takes, for as long as it stays
With local prefill    slow     what the sequences that a decode worker has wait while it computes a prompt for this one;
                               queue, fetch and compute as at a prefill worker, and nothing to move

More cached blocks never make any of them dearer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pd_router.itl_line import FIXED_STEP_SEQUENCES
from pd_router.pools import DEFAULT_ITL_MS, PlacementRequest, PrefixOffer, WorkerView

FETCH_FIXED_MS = 20.0  # to ask, to open, to verify and to end, however little is fetched
MAX_EXPECTED_TOKENS = 256  # max_tokens says what is allowed, not what will come: beyond this it says nothing


def assumed_itl_ms(num_sequences: int) -> float:
    """Between two tokens of a batch of so many, where nobody has measured it (`ItlLine` where somebody has)."""
    return DEFAULT_ITL_MS * (FIXED_STEP_SEQUENCES + num_sequences) / FIXED_STEP_SEQUENCES


def num_uncached_tokens(request: PlacementRequest, num_held: int) -> int:
    """To compute: on a full hit the last token is computed again, for its logits."""
    return request.num_tokens - num_held * request.block_size or 1


def num_expected_tokens(request: PlacementRequest) -> int:
    """To be generated."""
    return min(request.num_output_tokens, MAX_EXPECTED_TOKENS)


def mean_queue_ms(workers: Sequence[WorkerView]) -> float:
    """What a prompt waits at one of these prefill workers, on average."""
    return sum([worker.num_queued_tokens * worker.prefill_ms_per_token for worker in workers]) / len(workers)


def fetch_ms(worker: WorkerView, request: PlacementRequest, num_held: int, num_blocks: int) -> float:
    """To get so many leading blocks where some are held; nothing if all are."""
    if num_blocks <= num_held:
        return 0.0
    return FETCH_FIXED_MS + (num_blocks - num_held) * request.block_size * worker.move_ms_per_token


def num_blocks_had(
    worker: WorkerView, request: PlacementRequest, num_held: int, offer: PrefixOffer | None, ms_per_token: float
) -> int:
    """Leading blocks that a worker has when it begins to compute: those that it holds, or all of the offer if fetching
    the others costs less than computing them, at `ms_per_token`."""
    if offer is None or offer.num_blocks <= num_held:
        return num_held
    num_saved = num_uncached_tokens(request, num_held) - num_uncached_tokens(request, offer.num_blocks)
    is_cheaper = fetch_ms(worker, request, num_held, offer.num_blocks) < num_saved * ms_per_token
    return offer.num_blocks if is_cheaper else num_held


def num_blocks_at_prefill(
    worker: WorkerView, request: PlacementRequest, num_held: int, offer: PrefixOffer | None
) -> int:
    """`num_blocks_had` at a prefill worker."""
    return num_blocks_had(worker, request, num_held, offer, worker.prefill_ms_per_token)


def num_blocks_at_local(worker: WorkerView, request: PlacementRequest, num_held: int, offer: PrefixOffer | None) -> int:
    """`num_blocks_had` at a decode worker that computes the prompt itself: what its sequences wait counts too."""
    assert worker.local_prefill_ms_per_token is not None, worker.worker_id
    ms_per_token = worker.local_prefill_ms_per_token * (1 + worker.num_sequences)
    return num_blocks_had(worker, request, num_held, offer, ms_per_token)


def first_token_ms(worker: WorkerView, request: PlacementRequest, num_held: int, offer: PrefixOffer | None) -> float:
    """Queue, fetch and compute, at a prefill worker."""
    num_had = num_blocks_at_prefill(worker, request, num_held, offer)
    num_tokens = worker.num_queued_tokens + num_uncached_tokens(request, num_had)
    return num_tokens * worker.prefill_ms_per_token + fetch_ms(worker, request, num_held, num_had)


def prefill_ms(
    workers: Sequence[WorkerView], request: PlacementRequest, held: Mapping[str, int], offer: PrefixOffer | None
) -> list[float]:
    """Of each worker: queue, fetch, compute and delay. All at once, as it is done most often."""
    num_held, num_tokens, block_size = held.get, request.num_tokens, request.block_size
    delay_ms_per_token = mean_queue_ms(workers) / num_tokens
    if offer is not None:
        return [
            first_token_ms(worker, request, blocks, offer)
            + num_uncached_tokens(request, blocks) * delay_ms_per_token
            for worker in workers
            for blocks in (num_held(worker.worker_id, 0),)
        ]
    return [
        worker.num_queued_tokens * worker.prefill_ms_per_token
        + (num_tokens - num_held(worker.worker_id, 0) * block_size or 1)
        * (worker.prefill_ms_per_token + delay_ms_per_token)
        for worker in workers
    ]


def decode_ms(workers: Sequence[WorkerView], request: PlacementRequest, held: Mapping[str, int]) -> list[float]:
    """Of each worker, which has a free block: move, stay and hold."""
    num_held, num_tokens, block_size = held.get, request.num_tokens, request.block_size
    num_blocks, num_expected = request.num_decode_blocks, num_expected_tokens(request)
    return [
        (num_tokens - (blocks := num_held(worker.worker_id, 0)) * block_size) * worker.move_ms_per_token
        + num_expected * worker.next_itl_ms * (1 + (num_blocks - blocks) / worker.num_blocks_free)
        for worker in workers
    ]


def prefill_terms(
    worker: WorkerView, request: PlacementRequest, num_held: int, *, pool_queue_ms: float, offer: PrefixOffer | None
) -> dict[str, float]:
    """What `prefill_ms` is made of; no fetch if nothing is fetched. `pool_queue_ms`: the mean of those that could take
    it."""
    num_had = num_blocks_at_prefill(worker, request, num_held, offer)
    return {
        "queue": worker.num_queued_tokens * worker.prefill_ms_per_token,
        **_fetch_term(worker, request, num_held, num_had),
        "compute": num_uncached_tokens(request, num_had) * worker.prefill_ms_per_token,
        "delay": num_uncached_tokens(request, num_held) / request.num_tokens * pool_queue_ms,
    }


def decode_terms(worker: WorkerView, request: PlacementRequest, num_held: int) -> dict[str, float]:
    """What `decode_ms` is made of."""
    stay_ms = num_expected_tokens(request) * worker.next_itl_ms
    return {
        "move": (request.num_tokens - num_held * request.block_size) * worker.move_ms_per_token,
        "stay": stay_ms,
        "hold": stay_ms * (request.num_decode_blocks - num_held) / worker.num_blocks_free,
    }


def local_terms(
    worker: WorkerView, request: PlacementRequest, num_held: int, *, offer: PrefixOffer | None
) -> dict[str, float]:
    """Of a decode worker that offers to compute the prompt itself: it has nothing to move; no fetch if nothing is
    fetched."""
    assert worker.local_prefill_ms_per_token is not None, worker.worker_id
    num_had = num_blocks_at_local(worker, request, num_held, offer)
    compute_ms = num_uncached_tokens(request, num_had) * worker.local_prefill_ms_per_token
    stay_ms = num_expected_tokens(request) * worker.next_itl_ms
    return {
        "queue": worker.num_queued_tokens * worker.local_prefill_ms_per_token,
        **_fetch_term(worker, request, num_held, num_had),
        "compute": compute_ms,
        "slow": compute_ms * worker.num_sequences,
        "stay": stay_ms,
        "hold": stay_ms * (request.num_local_blocks - num_held) / worker.num_blocks_free,
    }


def break_even_tokens(prefill: WorkerView, decode: WorkerView) -> float | None:
    """Uncached tokens up to which local prefill at `decode` costs less than a handoff to it from `prefill`, where both
    have the same blocks cached.

    A handoff waits in the prefill worker's queue and wins per token; local prefill the other way round. None: it is
    not offered; `inf`: it does not even lose per token.
    """
    local_ms_per_token = decode.local_prefill_ms_per_token
    if local_ms_per_token is None:
        return None
    cost_per_token_ms = local_ms_per_token * (1 + decode.num_sequences)
    lost_per_token_ms = cost_per_token_ms - prefill.prefill_ms_per_token - decode.move_ms_per_token
    gained_ms = prefill.num_queued_tokens * prefill.prefill_ms_per_token - decode.num_queued_tokens * local_ms_per_token
    return max(0.0, gained_ms / lost_per_token_ms) if lost_per_token_ms > 0 else math.inf


def _fetch_term(worker: WorkerView, request: PlacementRequest, num_held: int, num_had: int) -> dict[str, float]:
    return {"fetch": fetch_ms(worker, request, num_held, num_had)} if num_had > num_held else {}
