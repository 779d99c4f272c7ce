"""Ids, positions, slots, blocks and experts that lie outside what they are indices of, and the errors that name them.

C++ kernels look at every index before they follow it, and say which one is wrong; for the reference it is found here
(torch would take -1 for the last one). On a GPU nothing looks: that would wait for the device in every op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pd_kernels.ops import Rows


class OutOfRange(IndexError):
    """An index of an op lies outside; the message names it, and what is allowed."""


def check_ids(ids_T: Tensor, table_ZD: Tensor) -> None:
    if (bad := _first((ids_T < 0) | (ids_T >= table_ZD.shape[0]))) >= 0:
        raise bad_id(ids_T, bad, table_ZD)


def bad_id(ids_T: Tensor, row: int, table_ZD: Tensor) -> OutOfRange:
    return OutOfRange(f"row {row}: token id {_at(ids_T, row)} is not in a table of {table_ZD.shape[0]}")


def check_positions(positions_T: Tensor, rope_P2R: Tensor) -> None:
    if (bad := _first(_outside(positions_T, rope_P2R))) >= 0:
        raise bad_position(positions_T, bad, rope_P2R)


def bad_position(positions_T: Tensor, row: int, rope_P2R: Tensor) -> OutOfRange:
    return OutOfRange(
        f"row {row}: position {_at(positions_T, row)} is not in a table of {rope_P2R.shape[0]} positions")


def check_slots(rows: Rows, rope_P2R: Tensor, cache_GKE: Tensor) -> None:
    num_slots = cache_GKE.shape[0] * cache_GKE.shape[1]
    outside = (rows.slots_T < 0) | (rows.slots_T >= num_slots) | _outside(rows.positions_T, rope_P2R)
    if (bad := _first(outside)) >= 0:
        raise bad_slot(rows, bad, rope_P2R, cache_GKE)


def bad_slot(rows: Rows, row: int, rope_P2R: Tensor, cache_GKE: Tensor) -> OutOfRange:
    return OutOfRange(
        f"row {row}: slot {_at(rows.slots_T, row)} or position {_at(rows.positions_T, row)} is outside a cache of "
        f"{cache_GKE.shape[0] * cache_GKE.shape[1]} slots and {rope_P2R.shape[0]} positions")


def check_context(rows: Rows, cache_GKE: Tensor, first_position: int) -> None:
    """Every block that a row may see is in its sequence's table and in the cache."""
    (S, B), (num_blocks, block_size, _) = rows.block_tables_SB.shape, cache_GKE.shape
    last_T = rows.positions_T // block_size
    outside = (rows.positions_T < 0) | (last_T >= B) | (rows.sequence_T < 0) | (rows.sequence_T >= S)
    if not bool(outside.any()):
        tables_TB = rows.block_tables_SB[rows.sequence_T.long()]
        number_B = torch.arange(B)
        seen_TB = (number_B <= last_T[:, None]) & (number_B >= first_position // block_size)
        outside = (seen_TB & ((tables_TB < 0) | (tables_TB >= num_blocks))).any(1)
    if (bad := _first(outside)) >= 0:
        raise bad_context(rows, bad, cache_GKE)


def bad_context(rows: Rows, row: int, cache_GKE: Tensor, rope_P2R: Tensor | None = None) -> OutOfRange:
    if rope_P2R is not None and _at(rows.positions_T, row) >= rope_P2R.shape[0]:
        return bad_position(rows.positions_T, row, rope_P2R)
    return OutOfRange(
        f"row {row}: position {_at(rows.positions_T, row)} of sequence {_at(rows.sequence_T, row)} is not within "
        f"{tuple(rows.block_tables_SB.shape)} block tables over a cache of {cache_GKE.shape[0]} blocks")


def check_experts(experts_TK: Tensor, num_experts: int) -> None:
    if (bad := _first(((experts_TK < 0) | (experts_TK >= num_experts)).flatten())) >= 0:
        raise bad_expert(experts_TK, bad, num_experts)


def bad_expert(experts_TK: Tensor, entry: int, num_experts: int) -> OutOfRange:
    row = entry // experts_TK.shape[1]
    return OutOfRange(f"row {row}: expert {_at(experts_TK.view(-1), entry)} is not one of {num_experts}")


def _at(tensor: Tensor, index: int) -> int:
    with torch._C.DisableTorchFunction():  # an error while a step is recorded shall be this one
        return int(tensor[index])


def _outside(positions_T: Tensor, rope_P2R: Tensor) -> Tensor:
    return (positions_T < 0) | (positions_T >= rope_P2R.shape[0])


def _first(is_wrong: Tensor) -> int:
    """The first entry that is, or -1."""
    wrong = is_wrong.nonzero()
    return int(wrong[0, 0]) if len(wrong) else -1
