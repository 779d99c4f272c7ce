"""The compiled CPU ops against the reference, within the tolerance table, on each instruction set of this machine."""

from __future__ import annotations

import pytest
import torch

from pd_kernels.cpu.ops import CpuOps
from pd_kernels.ops import Ops
from pd_kernels.tolerances import check_close
from support import kernel_ops
from support.kernel_cases import ALL_DIMS, DTYPES, PagedRun, PagedSequences, row_ops, same_bits
from support.kernel_checks import TABLE_NAMES

REFERENCE = kernel_ops.load("reference")
ROW_OPS = list(row_ops(ALL_DIMS["odd"], torch.float32, 1, 0))

implementations = pytest.mark.parametrize("implementation", kernel_ops.compiled_names())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
dimensions = pytest.mark.parametrize("dims", ALL_DIMS)


@implementations
@dtypes
@dimensions
@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 61])
def test_op_equals_the_reference(
    implementation: str, dtype: torch.dtype, dims: str, op: str, num_rows: int
) -> None:
    case = row_ops(ALL_DIMS[dims], dtype, num_rows, seed=num_rows)[op]
    indices = torch.arange(num_rows)
    for result, expected in zip(
        case(kernel_ops.load(implementation), indices), case(REFERENCE, indices), strict=True
    ):
        if result.dtype is torch.int32:  # tokens and experts: chosen from scores far enough apart
            assert torch.equal(result, expected)
        else:
            name = TABLE_NAMES.get(op, op)
            check_close(name, torch.float32 if op in ("head", "logprobs") else dtype, result, expected)


@implementations
@dtypes
@dimensions
@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("first_position", [0, 1, 70])
def test_attention_equals_the_reference(
    implementation: str, dtype: torch.dtype, dims: str, expanded: bool, first_position: int
) -> None:
    data = PagedSequences(ALL_DIMS[dims], dtype, [130, 1, 71], seed=1, first_position=first_position)
    ours = PagedRun(data, kernel_ops.load(implementation), block_size=16, seed=2)
    theirs = PagedRun(data, REFERENCE, block_size=16, seed=2)
    rows = data.rows()
    kv = torch.stack([data.kv[r.sequence][r.position] for r in rows])
    q = torch.stack([data.q[r.sequence][r.position] for r in rows])
    where = ours.place(rows)
    for run in (ours, theirs):
        run.ops.latent_write(kv, data.norm, 1e-6, data.rope, where, run.cache)
    check_close("latent_write", dtype, ours.cache, theirs.cache)
    ours.cache.copy_(theirs.cache)
    arguments = (theirs.cache, where, data.scale, first_position)
    if expanded:
        results = [run.ops.mla_attention_expanded(q, run.absorbed, data.rope, *arguments) for run in (ours, theirs)]
        check_close("mla_attention_expanded", dtype, *results)
    else:
        queries = REFERENCE.mla_queries(q, theirs.absorbed, data.rope, where.positions_T)
        results = [run.ops.mla_attention(queries, *arguments, data.dims.C) for run in (ours, theirs)]
        check_close("mla_attention", dtype, *results)


def all_results(ops: Ops, dims: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of every op, for few and many rows."""
    results = []
    for num_rows in (1, 2, 37):
        for op in row_ops(ALL_DIMS[dims], dtype, num_rows, seed=num_rows).values():
            results += op(ops, torch.arange(num_rows))
    data = PagedSequences(ALL_DIMS[dims], dtype, [130, 1, 71], seed=1)
    results += [PagedRun(data, ops, block_size=16, seed=2).step(data.rows(), expanded) for expanded in (False, True)]
    return results


@implementations
@dtypes
@dimensions
def test_the_number_of_threads_changes_no_bit(implementation: str, dtype: torch.dtype, dims: str) -> None:
    isa = implementation.removeprefix("cpu-")
    expected = all_results(CpuOps(isa, threads=1), dims, dtype)
    try:
        for threads in (2, 3, 5):
            results = all_results(CpuOps(isa, threads=threads), dims, dtype)
            assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))
    finally:
        CpuOps(isa, threads=1)


@dtypes
@dimensions
def test_instruction_sets_of_one_arithmetic_give_the_same_bits(dtype: torch.dtype, dims: str) -> None:
    """Hosts with and without AVX-512 share blocks: their fingerprints name the same numerics."""
    by_numerics: dict[str, list[str]] = {}
    for name in kernel_ops.compiled_names():
        by_numerics.setdefault(kernel_ops.load(name).numerics, []).append(name)
    alike = [names for names in by_numerics.values() if len(names) > 1]
    if not alike:
        pytest.skip("this CPU has one instruction set of each arithmetic")
    for first, *others in alike:
        expected = all_results(kernel_ops.load(first), dims, dtype)
        for other in others:
            results = all_results(kernel_ops.load(other), dims, dtype)
            assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True)), (first, other)
