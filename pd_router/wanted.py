"""What placement is asked for a request: its size, and the hashes of its full blocks, by which caches are asked."""

from __future__ import annotations

import asyncio

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.hashing import block_hashes
from pd_router.pools import PlacementRequest
from pd_router.request import Request

MAX_TOKENS_INLINE = 4_096  # longer prompts are hashed in a thread: about half a millisecond of the event loop


class PromptHashes:
    """Of one request. They depend on what the workers serve, which may be known late, or change."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._identity: tuple[str, int] | None = None
        self._hashes: tuple[bytes, ...] = ()

    async def of(self, workers: pb.WorkerInfo | None) -> tuple[bytes, ...]:
        """In order; none if no worker is known, or if cached blocks are not to be used.

        Args:
            workers: what any of the workers says of itself; they agree.
        """
        if workers is None or self._request.placement.bypass_prefix_cache:
            return ()
        identity = (workers.fingerprint, workers.block_size)
        if identity != self._identity:
            if len(self._request.prompt_ids) > MAX_TOKENS_INLINE:
                self._hashes = await asyncio.to_thread(self._compute, *identity)
            else:
                self._hashes = self._compute(*identity)
            self._identity = identity
        return self._hashes

    def _compute(self, fingerprint: str, block_size: int) -> tuple[bytes, ...]:
        request = self._request
        return tuple(
            block_hashes(
                request.prompt_ids, fingerprint=fingerprint, salt=request.cache_salt, block_size=block_size
            )
        )


def placement_request(
    request: Request,
    *,
    num_emitted: int,
    speculate: int,
    projected_tokens: int,
    block_size: int,
    block_hashes: tuple[bytes, ...],
    avoided: frozenset[str] = frozenset(),
    dying: frozenset[str] = frozenset(),
    preferred_decode: str = "",
    num_own_blocks: int = 0,
    num_local_tokens: int = 0,
    may_degrade: bool = True,
) -> PlacementRequest:
    """For an attempt that goes on after so many emitted tokens; if only one is left, prefill samples it.

    Args:
        projected_tokens: generated ones that a decode worker grants blocks for at first, at most; 0: all.
        avoided, dying, num_own_blocks, num_local_tokens, may_degrade: as of `PlacementRequest`.
    """
    num_tokens = len(request.prompt_ids) + num_emitted
    num_left = request.params.max_tokens - num_emitted
    num_slots = len(request.prompt_ids) + request.params.max_tokens + speculate
    num_first_slots = min(num_slots, num_tokens + projected_tokens + speculate) if projected_tokens else num_slots
    return PlacementRequest(
        num_tokens=num_tokens,
        num_prefill_blocks=-(-num_tokens // block_size),
        num_decode_blocks=0 if num_left == 1 else -(-num_first_slots // block_size),
        num_decode_blocks_at_most=0 if num_left == 1 else -(-num_slots // block_size),
        num_output_tokens=num_left,
        block_size=block_size,
        block_hashes=block_hashes,
        pinned_prefill=request.placement.prefill_worker,
        pinned_decode=request.placement.decode_worker,
        avoided=avoided,
        dying=dying,
        preferred_decode=preferred_decode,
        num_own_blocks=num_own_blocks,
        num_local_tokens=num_local_tokens,
        may_degrade=may_degrade,
    )
