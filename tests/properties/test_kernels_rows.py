"""Rows do not depend on company: bit for bit, for every op of every implementation that this machine can run."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import kernel_ops
from support.kernel_cases import (
    ALL_DIMS,
    DTYPES,
    PagedRun,
    PagedSequences,
    Row,
    RowOp,
    row_ops,
    same_bits,
)
from support.kernel_schedules import run_all, schedules

NUM_ROWS = 70
OP_NAMES = list(row_ops(ALL_DIMS["odd"], torch.float32, 1, 0))
EXAMPLES = settings(max_examples=6, deadline=None, derandomize=True)

implementations = pytest.mark.parametrize("implementation", kernel_ops.names())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
dimensions = pytest.mark.parametrize("dims", ALL_DIMS)


@functools.lru_cache(maxsize=8)
def cached_row_ops(dims: str, dtype: torch.dtype) -> dict[str, RowOp]:
    return row_ops(ALL_DIMS[dims], dtype, NUM_ROWS, seed=1)


@functools.lru_cache(maxsize=64)
def whole_result(implementation: str, dims: str, dtype: torch.dtype, op: str) -> list[torch.Tensor]:
    return cached_row_ops(dims, dtype)[op](kernel_ops.load(implementation), torch.arange(NUM_ROWS))


@implementations
@dtypes
@dimensions
@pytest.mark.parametrize("op", OP_NAMES)
@EXAMPLES
@given(rows=st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=40))
def test_a_row_is_the_same_in_any_company(
    implementation: str, dims: str, dtype: torch.dtype, op: str, rows: list[int]
) -> None:
    """Any rows, in any order, repeated or alone, give the bits that they have among all rows."""
    indices = torch.tensor(rows)
    some = cached_row_ops(dims, dtype)[op](kernel_ops.load(implementation), indices)
    for part, whole in zip(some, whole_result(implementation, dims, dtype, op), strict=True):
        assert same_bits(part, whole[indices])


@functools.lru_cache(maxsize=64)
def one_by_one(
    implementation: str, dims: str, dtype: torch.dtype, lengths: tuple[int, ...], first_position: int, expanded: bool
) -> tuple[PagedSequences, dict[Row, torch.Tensor]]:
    """Each row computed in a step of its own."""
    data = PagedSequences(ALL_DIMS[dims], dtype, list(lengths), seed=3, first_position=first_position)
    run = PagedRun(data, kernel_ops.load(implementation), block_size=64, seed=0)
    return data, run_all(run, [[row] for row in data.rows()], expanded)


@pytest.mark.parametrize(("implementation", "dims"), [
    pytest.param(name, dims, marks=[pytest.mark.slow] if name == "reference" and dims != "odd" else [])
    for name in kernel_ops.names() for dims in ("odd", "small", "eight_groups")
])
@dtypes
@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    data=st.data(),
    lengths=st.sampled_from([(1,), (3, 140), (64, 65, 1), (20, 129, 7)]),
    first_position=st.sampled_from([0, 1]),
    block_size=st.sampled_from([1, 5, 16, 64, 100]),
)
def test_attention_is_the_same_for_any_schedule(
    implementation: str, dims: str, dtype: torch.dtype, expanded: bool, data: st.DataObject,
    lengths: tuple[int, ...], first_position: int, block_size: int,
) -> None:
    """Batch, chunking, number of query tokens, block size and placement of blocks leave no trace; NaN in every slot
    that is not yet written goes nowhere."""
    sequences, expected = one_by_one(implementation, dims, dtype, lengths, first_position, expanded)
    steps = data.draw(schedules(list(lengths)))
    run = PagedRun(sequences, kernel_ops.load(implementation), block_size, seed=len(steps))
    for row, out in run_all(run, steps, expanded).items():
        assert same_bits(out, expected[row]), row
        assert bool(out.isfinite().all()) or row.position < first_position


@implementations
@dtypes
def test_rejected_drafts_leave_no_trace(implementation: str, dtype: torch.dtype) -> None:
    """Rows whose latents were written for wrong drafts are overwritten, and the right ones come out as if alone."""
    sequences, expected = one_by_one(implementation, "small", dtype, (3, 140), 0, False)
    run = PagedRun(sequences, kernel_ops.load(implementation), 16, seed=5)
    run.step([Row(sequence=1, position=p) for p in range(100)])
    drafted = [Row(sequence=1, position=p) for p in range(100, 104)]
    where = run.place(drafted)
    run.cache.view(-1, run.cache.shape[-1])[where.slots_T] = float("nan")
    for row in drafted:
        assert same_bits(run.step([row])[0], expected[row])


@implementations
@dtypes
@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_rows_and_one_row(implementation: str, dtype: torch.dtype, num_rows: int) -> None:
    ops = kernel_ops.load(implementation)
    for name, op in row_ops(ALL_DIMS["small"], dtype, num_rows, seed=2).items():
        for result in op(ops, torch.arange(num_rows)):
            assert result.shape[0] == num_rows, name
            assert bool(result.isfinite().all()), name
