"""Rows whose logits are not finite: the model's arithmetic overflowed. No token is taken from such a row, and only the
sequence that it belongs to ends."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TypeVar

import torch
from torch import Tensor

from pd_engine.errors import Internal

T = TypeVar("T")


def finite_rows(logits_TZ: Tensor) -> list[bool]:
    """Whether each row holds neither NaN nor infinity.

    A row's sum is finite only if all of it is, and costs a tenth of looking at each number; only a row whose sum is not
    (finite numbers may add up to infinity too) is looked at closely.
    """
    sums: list[float] = logits_TZ.sum(dim=1).tolist()
    return [math.isfinite(total) or bool(torch.isfinite(logits_TZ[row]).all()) for row, total in enumerate(sums)]


def overflow_error(position: int) -> Internal:
    """`position`: that of the token which could not be sampled."""
    return Internal(
        f"the model's arithmetic overflowed: the logits of the token at position {position} hold NaN or infinity"
    )


def all_or_raise(outcomes: Seq[T | Internal]) -> list[T]:
    """The results of a step, one a sequence.

    Raises:
        Internal: that of the first sequence that has none.
    """
    results = []
    for outcome in outcomes:
        if isinstance(outcome, Internal):
            raise outcome
        results.append(outcome)
    return results
