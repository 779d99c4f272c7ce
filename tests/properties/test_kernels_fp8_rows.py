"""Rows do not depend on company over a cache of FP8 slots: each row reads its own latent as the cache stores it."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import kernel_ops
from support.kernel_cases import DTYPES, FP8_LATENTS, PagedRun, PagedSequences, Row, same_bits
from support.kernel_schedules import run_all, schedules

implementations = pytest.mark.parametrize("implementation", kernel_ops.names())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


@functools.lru_cache(maxsize=64)
def one_by_one(
    implementation: str, dtype: torch.dtype, lengths: tuple[int, ...], first_position: int, expanded: bool
) -> tuple[PagedSequences, dict[Row, torch.Tensor]]:
    """Each row computed in a step of its own."""
    data = PagedSequences(FP8_LATENTS, dtype, list(lengths), seed=3, first_position=first_position, fp8=True)
    run = PagedRun(data, kernel_ops.load(implementation), block_size=64, seed=0)
    return data, run_all(run, [[row] for row in data.rows()], expanded)


@implementations
@dtypes
@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    data=st.data(),
    lengths=st.sampled_from([(1,), (3, 70), (64, 65, 1)]),
    first_position=st.sampled_from([0, 1]),
    block_size=st.sampled_from([1, 5, 16, 64]),
)
def test_attention_over_fp8_is_the_same_for_any_schedule(
    implementation: str, dtype: torch.dtype, expanded: bool, data: st.DataObject, lengths: tuple[int, ...],
    first_position: int, block_size: int,
) -> None:
    sequences, expected = one_by_one(implementation, dtype, lengths, first_position, expanded)
    steps = data.draw(schedules(list(lengths)))
    run = PagedRun(sequences, kernel_ops.load(implementation), block_size, seed=len(steps))
    for row, out in run_all(run, steps, expanded).items():
        assert same_bits(out, expected[row]), row
        assert bool(out.isfinite().all()) or row.position < first_position
