"""y = x W^T in fp32 with rows that do not depend on how many there are.

A matrix library may pick another order of summation for one row than for many. Padding to `MIN_ROWS` rows is enough
where that was measured; `choose_row_mode` checks it on this host, and where it fails every row is computed alone,
in one shape, at a cost that is logged.
"""

from __future__ import annotations

import functools
import logging
import time
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

MIN_ROWS = 4
CHECKED_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 33, 64, 100)
CHECKED_SHAPES = (  # (K, M) of x [T, K], W [M, K]
    (64, 64), (64, 576), (64, 512), (576, 64), (512, 64), (512, 32), (32, 512), (256, 704), (768, 256), (96, 40),
)


class RowMode(Enum):
    PADDED = "padded"  # all rows in one product, at least MIN_ROWS of them
    SINGLE = "single"  # one row at a time


def pack_linear(weight_MD: Tensor) -> Tensor:
    """The fp32 copy that the products use."""
    return weight_MD.float().contiguous()


def matmul(x_TK: Tensor, weight_MK: Tensor, mode: RowMode) -> Tensor:
    """x W^T for float32 x and W: float32 [T, M]."""
    if x_TK.shape[0] == 0:
        return x_TK.new_empty(0, weight_MK.shape[0])
    if mode is RowMode.SINGLE:
        return torch.cat([_padded_matmul(row, weight_MK) for row in x_TK.split(1)])
    return _padded_matmul(x_TK, weight_MK)


def _padded_matmul(x_TK: Tensor, weight_MK: Tensor) -> Tensor:
    num_rows = x_TK.shape[0]
    if num_rows < MIN_ROWS:
        return functional.linear(functional.pad(x_TK, (0, 0, 0, MIN_ROWS - num_rows)), weight_MK)[:num_rows]
    return functional.linear(x_TK, weight_MK)


def linear(x_TD: Tensor, weight_MD: Tensor, mode: RowMode, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T, fp32 inside, rounded once to `out_dtype` (the dtype of x by default)."""
    return matmul(x_TD.float().contiguous(), weight_MD, mode).to(out_dtype or x_TD.dtype)


def rows_are_independent() -> bool:
    """Whether a row's bits stay the same for every number of rows in `CHECKED_ROWS`, for all `CHECKED_SHAPES`."""
    generator = torch.Generator().manual_seed(0)
    for k, m in CHECKED_SHAPES:
        x = torch.randn(max(CHECKED_ROWS), k, generator=generator)
        weight = torch.randn(m, k, generator=generator)
        whole = matmul(x, weight, RowMode.PADDED)
        for num_rows in CHECKED_ROWS:
            start = x.shape[0] - num_rows
            if not torch.equal(matmul(x[start:].clone(), weight, RowMode.PADDED), whole[start:]):
                return False
    return True


@functools.cache
def choose_row_mode(num_threads: int) -> RowMode:
    """How this process multiplies with that many torch threads: checked once, some milliseconds."""
    if rows_are_independent():
        return RowMode.PADDED
    log.warning(
        "this host's matrix products depend on the number of rows (torch %s, %d threads): every row is computed "
        "alone, which makes 64 rows %.1f times slower", torch.__version__, num_threads, _cost_of_single_rows(),
    )
    return RowMode.SINGLE


def _cost_of_single_rows() -> float:
    x, weight = torch.randn(64, 256), torch.randn(704, 256)
    times_s = []
    for mode in (RowMode.PADDED, RowMode.SINGLE):
        start_s = time.perf_counter()
        for _ in range(4):
            matmul(x, weight, mode)
        times_s.append(time.perf_counter() - start_s)
    return times_s[1] / times_s[0]
