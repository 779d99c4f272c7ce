"""Pairs of (token, expert) sorted by expert, tiles of their rows, and the sum of a token's results.

Nothing here waits for the host: how many rows an expert has is known on the device only.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_PAIRS = 1024
BLOCK_D = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs of (token, rank) sorted by expert, stable: order_P int32 (token · ranks + rank), counts_X int32."""

    order_P: Tensor
    counts_X: Tensor
    num_ranks: int


@triton.jit(do_not_specialize=["num_tokens"])
def sort_kernel(experts_ptr, order_ptr, counts_ptr, num_tokens, K: tl.constexpr, RANKS: tl.constexpr,
                NUM_ROUTED: tl.constexpr, BLOCK: tl.constexpr):
    """One expert: where its pairs start, and its pairs in order of tokens."""
    expert = tl.program_id(0)
    if expert >= NUM_ROUTED:  # a part of the shared expert: every token
        shared = expert - NUM_ROUTED
        for first in range(0, num_tokens, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tl.store(order_ptr + num_tokens * (K + shared) + token, token * RANKS + K + shared, mask=token < num_tokens)
        tl.store(counts_ptr + expert, num_tokens)
        return
    lower = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_tokens * K, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = tl.load(experts_ptr + pair, mask=pair < num_tokens * K, other=NUM_ROUTED)
        lower += (chosen < expert).to(tl.int32)
    place = tl.sum(lower, 0)
    start = place
    for first in range(0, num_tokens * K, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = tl.load(experts_ptr + pair, mask=pair < num_tokens * K, other=NUM_ROUTED)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(mine, 0) - mine, pair // K * RANKS + pair % K, mask=mine == 1)
        place += tl.sum(mine, 0)
    tl.store(counts_ptr + expert, place - start)


def sort_by_expert(experts_TK: Tensor, num_routed: int, num_shared: int) -> Pairs:
    """The pairs of all tokens, each with `num_shared` more ranks than were routed. No transfer to the host."""
    num_tokens, k = experts_TK.shape
    num_ranks, num_experts = k + num_shared, num_routed + num_shared
    order_P = torch.empty(num_tokens * num_ranks, dtype=torch.int32, device=experts_TK.device)
    counts_X = torch.empty(num_experts, dtype=torch.int32, device=experts_TK.device)
    sort_kernel[(num_experts,)](experts_TK, order_P, counts_X, num_tokens, K=k, RANKS=num_ranks, NUM_ROUTED=num_routed,
                                BLOCK=BLOCK_PAIRS, num_warps=4)
    return Pairs(order_P=order_P, counts_X=counts_X, num_ranks=num_ranks)


@triton.jit
def find_tile(counts_ptr, tile, NUM_EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_T: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a tile of sorted rows; first >= end beyond the last tile."""
    index = tl.arange(0, BLOCK_X)
    counts = tl.load(counts_ptr + index, mask=index < NUM_EXPERTS, other=0)
    tiles = (counts + BLOCK_T - 1) // BLOCK_T
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(index < expert, tiles, 0), 0)
    start = tl.sum(tl.where(index < expert, counts, 0), 0)
    end = tl.sum(tl.where(index <= expert, counts, 0), 0)
    return expert, start + (tile - before) * BLOCK_T, end


@triton.jit
def add_ranks_kernel(pairs_ptr, weights_ptr, y_ptr, width, shared_scale, K: tl.constexpr, RANKS: tl.constexpr,
                     BLOCK: tl.constexpr):
    """Σ of a token's results in rank order, the shared ones all with the same weight, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    y = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        part = tl.load(pairs_ptr + (token * RANKS + rank) * width + column, mask=mask, other=0.0)
        if rank < K:
            part = part * tl.load(weights_ptr + token * K + rank)
        else:
            part = part * shared_scale
        y = part if rank == 0 else y + part
    tl.store(y_ptr + token * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


def num_tiles(num_rows: int, pairs: Pairs | None, block_t: int) -> int:
    """Tiles of rows at most: every expert's last one may be partly filled. Programs beyond the last end at once."""
    most = triton.cdiv(num_rows, block_t)
    return int(most if pairs is None else min(num_rows, most + pairs.counts_X.shape[0]))


def add_ranks(out_PD: Tensor, weights_TK: Tensor, y_TD: Tensor, num_ranks: int, shared_scale: float) -> None:
    """y = Σ of each token's pairs in rank order; ranks beyond the routed ones have weight `shared_scale`."""
    num_tokens, width = y_TD.shape
    add_ranks_kernel[num_tokens, triton.cdiv(width, BLOCK_D)](
        out_PD, weights_TK, y_TD, width, shared_scale, K=weights_TK.shape[1], RANKS=num_ranks, BLOCK=BLOCK_D,
        num_warps=4, enable_fp_fusion=False,
    )
