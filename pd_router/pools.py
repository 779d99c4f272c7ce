"""What placement sees: the workers of both pools at one moment, and what is to be placed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Assumed of a worker as long as neither it nor another one of its pool has been measured.
DEFAULT_PREFILL_MS_PER_TOKEN = 1.0
DEFAULT_ITL_MS = 20.0
DEFAULT_MOVE_MS_PER_TOKEN = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """One worker at one moment. Rates are measured ones, or assumed where nothing was measured; none is 0.

    Attributes:
        ready: takes new work.
        expected: is there, or may come back; False once it is known that it will not.
        has_room: False after it refused for lack of room, until it next reports, and while sequences wait for blocks
            there.
        has_refused: the former.
        num_queued_tokens: prompt tokens that wait or run there; at a decode worker, of those that it computes itself.
        num_sequences: that it decodes or will.
        num_blocks_free: for a prefill worker all it has, as prompts wait there for theirs.
        prefill_ms_per_token: of a prefill worker.
        next_itl_ms: between two tokens of a sequence at a decode worker, once there is one sequence more.
        alone_itl_ms: the same with one sequence in all.
        itl_limit_ms: more than this breaks the target of a sequence that is there; inf: none has one.
        move_ms_per_token: to pull the cache of a token.
        local_prefill_ms_per_token: of a decode worker that offers to compute prompts itself, beside its steps; None:
            it does not.
    """

    worker_id: str
    ready: bool
    expected: bool = True
    has_room: bool = True
    has_refused: bool = False
    num_queued_tokens: int = 0
    num_sequences: int = 0
    num_blocks_free: int = 0
    num_blocks_total: int = 0
    prefill_ms_per_token: float = DEFAULT_PREFILL_MS_PER_TOKEN
    next_itl_ms: float = DEFAULT_ITL_MS
    alone_itl_ms: float = DEFAULT_ITL_MS
    itl_limit_ms: float = math.inf
    move_ms_per_token: float = DEFAULT_MOVE_MS_PER_TOKEN
    local_prefill_ms_per_token: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixOffer:
    """`num_blocks` leading blocks of the prompt are cached at that worker, for others to fetch."""

    worker_id: str
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Both pools, and how many leading blocks of the prompt workers hold; those that hold none are not in `held`.

    `prefill_is_measured`, `itl_is_measured`: whether any worker of the pool has measured its speed. `can_fetch`:
    workers that compute prompts take cached blocks from others.
    """

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    held: Mapping[str, int] = field(default_factory=dict)
    prefill_is_measured: bool = False
    itl_is_measured: bool = False
    can_fetch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRequest:
    """What is to be placed.

    Attributes:
        num_tokens: to prefill: prompt and emitted.
        num_prefill_blocks: that it needs there at most.
        num_decode_blocks: that it is granted there at first; none if it is never handed over.
        num_decode_blocks_at_most: that the worker must have in all, for its greatest length; 0: no more than at first.
        num_output_tokens: that it may still generate.
        block_size: tokens a block.
        block_hashes: of the prompt's full blocks, in order; none if cached blocks are not to be used.
        pinned_prefill, pinned_decode: the only worker allowed; empty: any. A decode worker as `pinned_prefill` is to
            compute the prompt itself.
        avoided: workers that failed this journey; taken only if nobody else is there.
        dying: those of them that are not known to have come back since.
        preferred_decode: holds verified blocks of this journey; empty: none.
        num_own_blocks: of the lease that the journey's last attempt has left there, which the next one takes over.
        first_token_within_ms: prefill workers that would be later are taken only if all would be; None: whenever.
        itl_within_ms: decode workers that would be slower with it have no room, nor those where it would break another
            one's target; inf: it has no target of its own; None: it goes anywhere.
        num_local_tokens: of a prompt whose beginning a decode worker has cached, that it may compute itself at most.
        may_degrade: where no prefill worker is left, decode workers may compute prompts.
    """

    num_tokens: int
    num_prefill_blocks: int
    num_decode_blocks: int
    num_decode_blocks_at_most: int = 0
    num_output_tokens: int = 1
    block_size: int = 16
    block_hashes: tuple[bytes, ...] = ()
    pinned_prefill: str = ""
    pinned_decode: str = ""
    avoided: frozenset[str] = frozenset()
    dying: frozenset[str] = frozenset()
    preferred_decode: str = ""
    num_own_blocks: int = 0
    first_token_within_ms: float | None = None
    itl_within_ms: float | None = None
    num_local_tokens: int = 0
    may_degrade: bool = True

    @property
    def num_local_blocks(self) -> int:
        """That it needs at first at a decode worker that computes the prompt."""
        return self.num_decode_blocks or self.num_prefill_blocks
