"""What every implementation of the ops must satisfy, as plain functions that raise AssertionError."""

from __future__ import annotations

import numpy as np
import torch

from pd_kernels.latent_fp8.reference import decode
from pd_kernels.ops import Ops
from pd_kernels.tolerances import check_close
from support import kernel_ops
from support.kernel_cases import DTYPES, FP8_LATENTS, Dims, PagedRun, PagedSequences, row_ops, same_bits

TABLE_NAMES = {  # entries of pd_kernels.tolerances
    "head": "linear", "moe_experts_unshared": "moe_experts", "linear_fp8": "linear", "moe_experts_fp8": "moe_experts",
    "swiglu_fp8": "swiglu",
}


def check_all(ops: Ops, dims: Dims) -> None:
    """Some seconds; the property tests go further."""
    for dtype in DTYPES:
        for op in row_ops(dims, dtype, 1, seed=0):
            for num_rows in (1, 9):
                check_op(ops, dims, dtype, op, num_rows)
            check_rows_are_independent(ops, dims, dtype, op)
        for expanded in (False, True):
            for first_position in (0, 1):
                check_attention(ops, dims, dtype, expanded=expanded, first_position=first_position)
            check_attention(ops, FP8_LATENTS, dtype, expanded=expanded, first_position=0, fp8=True)
    check_ties(ops, dims)
    check_checksums(ops)


def check_op(ops: Ops, dims: Dims, dtype: torch.dtype, op: str, num_rows: int) -> None:
    """The op gives the reference's results, within tolerance; tokens and experts exactly."""
    case = row_ops(dims, dtype, num_rows, seed=num_rows)[op]
    indices = torch.arange(num_rows)
    reference = kernel_ops.load("reference")
    for result, expected in zip(case(ops, indices), case(reference, indices), strict=True):
        if result.dtype is torch.int32:
            assert torch.equal(result, expected), op
        else:
            result_dtype = torch.float32 if op in ("head", "logprobs") else dtype
            check_close(TABLE_NAMES.get(op, op), result_dtype, result, expected)


def check_rows_are_independent(ops: Ops, dims: Dims, dtype: torch.dtype, op: str) -> None:
    """Rows alone, in pairs and reversed have the bits that they have among all."""
    num_rows = 23
    case = row_ops(dims, dtype, num_rows, seed=5)[op]
    whole = case(ops, torch.arange(num_rows))
    for rows in ([0], [22], [3, 3], [7, 1], list(reversed(range(num_rows)))):
        for some, all_rows in zip(case(ops, torch.tensor(rows)), whole, strict=True):
            assert same_bits(some, all_rows[rows]), (op, rows)


def check_attention(
    ops: Ops, dims: Dims, dtype: torch.dtype, *, expanded: bool, first_position: int, fp8: bool = False
) -> None:
    """Whole prompts in one step equal the reference, and row by row they have the same bits, whatever NaN the slots
    behind them hold."""
    name = "mla_attention_expanded" if expanded else "mla_attention"
    data = PagedSequences(dims, dtype, [70, 9], seed=1, first_position=first_position, fp8=fp8)
    rows = data.rows()
    ours = PagedRun(data, ops, block_size=16, seed=2)
    result = ours.step(rows, expanded)
    reference = PagedRun(data, kernel_ops.load("reference"), block_size=16, seed=2)
    expected = reference.step(rows, expanded)
    if fp8:
        check_slots(ours.cache, reference.cache, dims.C)
    else:
        check_close("latent_write", dtype, ours.cache, reference.cache)
    if dtype is torch.float32 and not fp8:  # in FP8 and bf16 a flipped rounding reaches further
        check_close(name, dtype, result, expected)
    alone = PagedRun(data, ops, block_size=7, seed=3)
    for row, out in zip(rows, result, strict=True):
        assert same_bits(alone.step([row], expanded)[0], out), (name, row)
    check_later_rows_are_not_seen(data, ops, result, expanded)


def check_slots(cache_GKB: torch.Tensor, expected_GKB: torch.Tensor, latent_width: int) -> None:
    """FP8 slots stand for the same numbers but for a step of e4m3 here and there: the order of the norm's sum flips
    hardly any rounding."""
    ours, theirs = (decode(cache.flatten(0, 1), latent_width) for cache in (cache_GKB, expected_GKB))
    check_close("latent_write_fp8", torch.bfloat16, ours, theirs)
    differ = (ours != theirs) & theirs.isfinite()
    assert int(differ.sum()) <= ours.numel() // 200, f"{int(differ.sum())} of {ours.numel()} numbers differ"


def check_later_rows_are_not_seen(data: PagedSequences, ops: Ops, expected: torch.Tensor, expanded: bool) -> None:
    """A row of NaN harms itself and those behind it, none before it in the same step."""
    rows = data.rows()
    poisoned = 37
    latents = data.kv[0][poisoned].clone()
    data.kv[0][poisoned] = float("nan")
    result = PagedRun(data, ops, block_size=16, seed=2).step(rows, expanded)
    data.kv[0][poisoned] = latents
    for row, out, clean in zip(rows, result, expected, strict=True):
        if row.sequence == 0 and row.position >= poisoned:
            assert bool(out.isnan().all()), row
        else:
            assert same_bits(out, clean), row


def check_ties(ops: Ops, dims: Dims) -> None:
    """Equal experts and equal logits go to the lowest index."""
    _, experts = ops.moe_gate(
        torch.zeros(1, 16), ops.pack_linear(torch.zeros(dims.X, 16)), torch.zeros(dims.X), dims.gate)
    assert experts.tolist() == [list(range(dims.K))]


def check_checksums(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    pieces = [memoryview(rng.bytes(length)) for length in (0, 1, 3, 4, 63, 64, 65, 1000, 4096, 73_728)]
    reference = kernel_ops.load("reference")
    assert ops.block_checksums(pieces).tolist() == reference.block_checksums(pieces).tolist()
