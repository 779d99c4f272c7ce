"""Rows of the embedding table."""

from __future__ import annotations

from torch import Tensor


def embed(ids_T: Tensor, table_ZD: Tensor) -> Tensor:
    """x_TD = table[ids], in the table's dtype."""
    return table_ZD[ids_T.long()]
