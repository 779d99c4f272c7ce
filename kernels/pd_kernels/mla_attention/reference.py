"""Attention over the paged latent cache, absorbed and expanded.

A row sees slots first_position..own position of its sequence. The context is cut into tiles of `ATTENTION_TILE`
keys at fixed absolute positions. For a row and head

    m = max over visible keys of s,   p = exp(s - m), 0 where not visible,
    l = Σ over tiles, in order, of Σ p (a tree within the tile),
    o = (Σ over tiles, in order, of p_tile · values_tile) / l

so a tile without visible keys adds exact zeros, and the bits of a row do not depend on where its context ends for
others. (An online softmax computes the same; the maximum needs no order.) Slots that a row may not see are replaced
by zeros before any product: NaN in them goes nowhere. Slots in FP8 stand for the bf16 numbers that they decode to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pd_kernels.absorb.reference import AbsorbedWeight
from pd_kernels.elementary.reference import exp, sum_tree
from pd_kernels.latent_fp8.reference import decode
from pd_kernels.linear.reference import matmul
from pd_kernels.ops import ATTENTION_TILE, Rows
from pd_kernels.rope.reference import rotate

MAX_SCORES = 1 << 22  # scores held at a time; rows beyond are computed in a further pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged:
    """The cache of one component (uint8: slots in FP8) and the rows that read it."""

    cache_GKE: Tensor
    rows: Rows
    first_position: int
    latent_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One sequence's visible context, padded to whole tiles of zeros: latents_JLE float32, J tiles of L keys."""

    latents_JLE: Tensor
    first_position: int


def mla_attention(q_THE: Tensor, cache_GKE: Tensor, rows: Rows, scale: float, first_position: int,
                  latent_width: int, min_rows: int) -> Tensor:
    """o_THC in the dtype of q: keys are whole latents, values their first `latent_width` numbers."""
    def attend(indices: Tensor, context: Context) -> Tensor:
        q_nHE = q_THE[indices].float()
        n, num_heads, width = q_nHE.shape
        values_JCL = context.latents_JLE[..., :latent_width].transpose(1, 2).contiguous()
        scores, visible = _masked_scores(
            [matmul(q_nHE.view(n * num_heads, width), keys, min_rows) for keys in context.latents_JLE],
            n, num_heads, rows.positions_T[indices], context, scale,
        )
        return _reduce(scores, visible, lambda p_nHL, j: matmul(
            p_nHL.reshape(n * num_heads, -1), values_JCL[j], min_rows).view(n, num_heads, -1))

    out = q_THE.new_empty(q_THE.shape[0], q_THE.shape[1], latent_width)
    paged = Paged(cache_GKE=cache_GKE, rows=rows, first_position=first_position, latent_width=latent_width)
    _for_each_sequence(out, paged, attend, num_heads=q_THE.shape[1])
    return out


def mla_attention_expanded(q_TF: Tensor, weight: AbsorbedWeight, rope_P2R: Tensor, cache_GKE: Tensor, rows: Rows,
                           scale: float, first_position: int, min_rows: int) -> Tensor:
    """[T, H·V] in the dtype of q: keys and values expanded a head from the latents, unrounded."""
    num_heads, nope, latent = weight.num_heads, weight.nope_width, weight.latent_width
    value_width = weight.w_uv_HVC.shape[1]
    q_THF = q_TF.reshape(q_TF.shape[0], num_heads, q_TF.shape[1] // num_heads)
    queries_THF = torch.cat([q_THF[..., :nope].float(), rotate(q_THF[..., nope:], rope_P2R, rows.positions_T)], dim=-1)

    def attend(indices: Tensor, context: Context) -> Tensor:
        q_HnF = queries_THF[indices].transpose(0, 1).contiguous()
        scores, values_JHVL = [], []
        for latents_LE in context.latents_JLE:
            c_LC, k_LR = latents_LE[:, :latent].contiguous(), latents_LE[:, latent:]
            k_LHN = matmul(c_LC, weight.w_uk_HNC.flatten(0, 1), min_rows).view(-1, num_heads, nope)
            v_LHV = matmul(c_LC, weight.w_uv_HVC.flatten(0, 1), min_rows).view(-1, num_heads, value_width)
            keys_LHF = torch.cat([k_LHN, k_LR.unsqueeze(1).expand(-1, num_heads, -1)], dim=-1)
            values_JHVL.append(v_LHV.permute(1, 2, 0).contiguous())
            per_head = [matmul(q_HnF[h], keys_LHF[:, h].contiguous(), min_rows) for h in range(num_heads)]
            scores.append(torch.stack(per_head, dim=1))
        masked, visible = _masked_scores(scores, len(indices), num_heads, rows.positions_T[indices], context, scale)
        return _reduce(masked, visible, lambda p_nHL, j: torch.stack(
            [matmul(p_nHL[:, h].contiguous(), values_JHVL[j][h], min_rows) for h in range(num_heads)], dim=1))

    out = q_TF.new_empty(q_TF.shape[0], num_heads, value_width)
    paged = Paged(cache_GKE=cache_GKE, rows=rows, first_position=first_position, latent_width=latent)
    _for_each_sequence(out, paged, attend, num_heads=num_heads)
    return out.flatten(1)


def _for_each_sequence(out_THv: Tensor, paged: Paged, attend: Callable[[Tensor, Context], Tensor],
                       num_heads: int) -> None:
    """Fills `out` row by row of each sequence, a bounded number of scores at a time."""
    rows = paged.rows
    for sequence in torch.unique(rows.sequence_T).tolist():
        indices = (rows.sequence_T == sequence).nonzero()[:, 0]
        table = rows.block_tables_SB[sequence]
        context = gather_context(paged, table, int(rows.positions_T[indices].max()) + 1)
        if bool(context.latents_JLE.isfinite().all()):
            num_rows = max(1, MAX_SCORES // (num_heads * context.latents_JLE.shape[0] * ATTENTION_TILE))
            for part in indices.split(num_rows):
                out_THv[part] = attend(part, context).to(out_THv.dtype)
            continue
        for index in indices:  # 0 · NaN is NaN: each row is given no more than it may see
            own = gather_context(paged, table, int(rows.positions_T[index]) + 1)
            out_THv[index] = attend(index[None], own)[0].to(out_THv.dtype)


def gather_context(paged: Paged, block_table_B: Tensor, length: int) -> Context:
    """Slots first_position..length-1 of a sequence as the cache stores them, in float32; zeros around them."""
    cache_GKE, first_position = paged.cache_GKE, paged.first_position
    block_size = cache_GKE.shape[1]
    num_tiles = -(-length // ATTENTION_TILE)
    blocks = block_table_B[: -(-length // block_size)].long()
    slots = cache_GKE[blocks].flatten(0, 1)[:length]
    stored = decode(slots, paged.latent_width) if cache_GKE.dtype is torch.uint8 else slots
    latents = stored.new_zeros(num_tiles * ATTENTION_TILE, stored.shape[-1])
    latents[:length] = stored
    latents[:first_position] = 0
    return Context(latents_JLE=latents.float().view(num_tiles, ATTENTION_TILE, -1), first_position=first_position)


def _masked_scores(tiles: list[Tensor], num_rows: int, num_heads: int, positions_n: Tensor, context: Context,
                   scale: float) -> tuple[Tensor, Tensor]:
    """(scores [n, H, J, L], -inf where not visible; visible [n, 1, J, L]) from a [n·H, L] product a tile."""
    scores = torch.stack([tile.reshape(num_rows, num_heads, -1) for tile in tiles], dim=2) * scale
    keys = torch.arange(len(tiles) * ATTENTION_TILE, dtype=torch.int32)
    visible = (keys <= positions_n[:, None]) & (keys >= context.first_position)
    visible = visible.view(num_rows, 1, len(tiles), ATTENTION_TILE)
    return scores.masked_fill_(~visible, float("-inf")), visible


def _reduce(scores_nHJL: Tensor, visible_n1JL: Tensor, values_product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """softmax(scores) · values: float32 [n, H, value width]; zeros for a row that sees nothing."""
    maximum = scores_nHJL.amax(dim=(2, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    p_nHJL = exp(scores_nHJL - maximum).mul_(visible_n1JL)
    sums_nHJ = sum_tree(p_nHJL)
    total = sums_nHJ[..., 0]
    out = values_product(p_nHJL[:, :, 0], 0)
    for j in range(1, p_nHJL.shape[2]):
        total = total + sums_nHJ[..., j]
        out = out + values_product(p_nHJL[:, :, j], j)
    return out / total.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
