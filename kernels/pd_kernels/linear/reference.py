"""y = x W^T in fp32 with rows that do not depend on how many there are.

A matrix library may pick another order of summation for a few rows than for many, and for a few columns. Padding to
enough of both helps where that was measured (12 columns; 4 rows with one thread, more with several).
`choose_min_rows` checks it on this host, and where no padding helps every row is computed alone, in one shape. What
that costs is logged.
"""

from __future__ import annotations

import functools
import logging
import time

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

MIN_ROWS_TRIED = (4, 16, 64)  # products are padded to so many rows at least
EACH_ROW_ALONE = 1            # the min_rows that stands for one product a row
MIN_COLUMNS = 16
CHECKED_ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 33, 64, 100)
CHECKED_SHAPES = (  # (K, M) of x [T, K], W [M, K]
    (64, 64), (64, 576), (64, 512), (576, 64), (512, 64), (512, 32), (32, 512), (256, 704), (768, 256), (96, 40),
    (50, 6), (257, 4), (64, 1),
)


def pack_linear(weight_MD: Tensor) -> Tensor:
    """The fp32 copy that the products use."""
    return weight_MD.float().contiguous()


def matmul(x_TK: Tensor, weight_MK: Tensor, min_rows: int) -> Tensor:
    """x W^T for float32 x and W: float32 [T, M]."""
    num_rows = x_TK.shape[0]
    if num_rows == 0:
        return x_TK.new_empty(0, weight_MK.shape[0])
    if weight_MK.shape[0] < MIN_COLUMNS:
        padded = functional.pad(weight_MK, (0, 0, 0, MIN_COLUMNS - weight_MK.shape[0]))
        return matmul(x_TK, padded, min_rows)[:, : weight_MK.shape[0]]
    if min_rows == EACH_ROW_ALONE:
        return torch.cat([functional.linear(x_TK[t : t + 1].clone(), weight_MK) for t in range(num_rows)])
    if num_rows < min_rows:
        return functional.linear(functional.pad(x_TK, (0, 0, 0, min_rows - num_rows)), weight_MK)[:num_rows]
    return functional.linear(x_TK, weight_MK)


def linear(x_TD: Tensor, weight_MD: Tensor, min_rows: int, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T, fp32 inside, rounded once to `out_dtype` (the dtype of x by default)."""
    return matmul(x_TD.float().contiguous(), weight_MD, min_rows).to(out_dtype or x_TD.dtype)


def rows_are_independent(min_rows: int) -> bool:
    """Whether a row's bits stay the same for every number of rows in `CHECKED_ROWS`, for all `CHECKED_SHAPES`."""
    generator = torch.Generator().manual_seed(0)
    for k, m in CHECKED_SHAPES:
        x = torch.randn(max(CHECKED_ROWS), k, generator=generator)
        weight = torch.randn(m, k, generator=generator)
        whole = matmul(x, weight, min_rows)
        for num_rows in CHECKED_ROWS:
            start = x.shape[0] - num_rows
            if not torch.equal(matmul(x[start:].clone(), weight, min_rows), whole[start:]):
                return False
    return True


@functools.cache
def choose_min_rows(num_threads: int) -> int:
    """The padding that this process needs with that many torch threads: checked once, some ten milliseconds."""
    chosen = next((rows for rows in MIN_ROWS_TRIED if rows_are_independent(rows)), EACH_ROW_ALONE)
    if chosen != MIN_ROWS_TRIED[0]:
        log.warning(
            "matrix products of this host depend on the number of rows (torch %s, threads: %d): %s, which makes one "
            "row %.1f times and 64 rows %.1f times slower",
            torch.__version__, num_threads,
            "every row is computed alone" if chosen == EACH_ROW_ALONE else f"they are padded to {chosen} rows",
            _slowdown(1, chosen), _slowdown(64, chosen),
        )
    return chosen


def _slowdown(num_rows: int, min_rows: int) -> float:
    x, weight = torch.randn(num_rows, 256), torch.randn(704, 256)
    times_s = []
    for rows in (MIN_ROWS_TRIED[0], min_rows):
        start_s = time.perf_counter()
        for _ in range(4):
            matmul(x, weight, rows)
        times_s.append(time.perf_counter() - start_s)
    return times_s[1] / times_s[0]
