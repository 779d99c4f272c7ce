"""Every op over the Triton kernels against the reference, and rows that do not depend on company."""

from __future__ import annotations

import pytest
import torch

from pd_kernels.ops import GateConfig
from support.kernel_cases import ALL_DIMS, EIGHT_GROUPS, ODD, SMALL, Inputs, row_ops, same_bits
from support.triton_cases import check_op, dtypes, reference_ops, triton_ops

from pd_kernels.moe_gate.triton import choose_experts  # isort: skip

OPS = list(row_ops(ODD, torch.float32, 1, 0))


def compare(dims: str, dtype: torch.dtype, op: str, num_rows: int) -> None:
    """The op on `num_rows` rows against the reference; then some of the rows, in another order, have the same bits."""
    case, rows = row_ops(ALL_DIMS[dims], dtype, num_rows, seed=num_rows)[op], torch.arange(num_rows)
    results = case(triton_ops(), rows)
    for result, expected in zip(results, case(reference_ops(), rows), strict=True):
        check_op(op, dtype, result, expected)
    some = torch.tensor([num_rows - 1, 0, num_rows // 2])
    for part, whole in zip(case(triton_ops(), some), results, strict=True):
        assert same_bits(part, whole[some])


@dtypes
@pytest.mark.parametrize("op", OPS)
def test_op_equals_the_reference(dtype: torch.dtype, op: str) -> None:
    compare("odd", dtype, op, num_rows=7)


@pytest.mark.slow
@dtypes
@pytest.mark.parametrize("dims", ["small", "demo", "eight_groups"])
@pytest.mark.parametrize("op", OPS)
def test_op_equals_the_reference_for_more_shapes(dims: str, dtype: torch.dtype, op: str) -> None:
    compare(dims, dtype, op, num_rows=9)


@dtypes
@pytest.mark.parametrize("op", [
    "linear", "head", "moe_experts", "swiglu", "linear_fp8",
    pytest.param("moe_experts_fp8", marks=pytest.mark.slow), "swiglu_fp8",
])
def test_a_row_has_the_same_bits_in_small_and_large_tiles(dtype: torch.dtype, op: str) -> None:
    """150 rows take another kernel configuration than one row."""
    case = row_ops(ODD, dtype, 150, seed=3)[op]
    whole, alone = case(triton_ops(), torch.arange(150))[0], case(triton_ops(), torch.tensor([149]))[0]
    assert same_bits(alone, whole[149:])


@dtypes
@pytest.mark.parametrize("num_rows", [1, 70, pytest.param(520, marks=pytest.mark.slow)])
def test_linear_with_a_sum_in_chunks(dtype: torch.dtype, num_rows: int) -> None:
    """A narrow weight's sum over K is cut into chunks: side by side for few rows, one after the other for many."""
    from pd_kernels.linear.triton import chunk_width

    assert -(-1100 // chunk_width(20, 1100, 1)) == 2
    make = Inputs(5, dtype)
    x, weight = make.normal(num_rows, 1100), make.weight(20, 1100)
    result = triton_ops().linear(x, triton_ops().pack_linear(weight))
    check_op("linear", dtype, result, reference_ops().linear(x, reference_ops().pack_linear(weight)))
    assert same_bits(triton_ops().linear(x[-1:].clone(), weight), result[-1:])


@dtypes
def test_rows_may_be_slices_of_a_wider_matrix(dtype: torch.dtype) -> None:
    """As the parts of a fused projection are."""
    make = Inputs(6, dtype)
    wide, residual, norm, weight = make.normal(5, 90), make.normal(5, 70), make.normal(50).float(), make.weight(20, 50)
    x, r = wide[:, 30:80], residual[:, 7:57]
    for ops in (triton_ops(), reference_ops()):
        whole, parts = (x.contiguous(), r.contiguous()), (x, r)
        assert same_bits(ops.rms_norm(parts[0], norm, 1e-6), ops.rms_norm(whole[0], norm, 1e-6))
        for part, full in zip(ops.add_rms_norm(*parts, norm, 1e-6), ops.add_rms_norm(*whole, norm, 1e-6), strict=True):
            assert same_bits(part, full)
        packed = ops.pack_linear(weight)
        assert same_bits(ops.linear(parts[0], packed), ops.linear(whole[0], packed))


@dtypes
@pytest.mark.parametrize("op", OPS)
def test_no_rows(dtype: torch.dtype, op: str) -> None:
    for result in row_ops(SMALL, dtype, 0, seed=1)[op](triton_ops(), torch.arange(0)):
        assert result.shape[0] == 0


@pytest.mark.parametrize("op", ["rms_norm", "linear", "moe_experts", "swiglu"])
def test_a_row_of_nan_and_infinity_stays_by_itself(op: str) -> None:
    case = row_ops(ODD, torch.bfloat16, 6, seed=2)[op]
    clean = case(triton_ops(), torch.arange(6))[0]
    spoiled = row_ops.__wrapped__(ODD, torch.bfloat16, 6, seed=2)[op]  # inputs of its own, which are changed here
    cells = dict(zip(spoiled.__code__.co_freevars, spoiled.__closure__ or (), strict=True))
    cells["x"].cell_contents[2, 3] = float("nan")
    cells["x"].cell_contents[4, 1] = float("inf")
    result = spoiled(triton_ops(), torch.arange(6))[0]
    others = torch.tensor([0, 1, 3, 5])
    assert same_bits(result[others], clean[others])
    assert result[2].isnan().any()
    assert not result[4].isfinite().all()


@pytest.mark.parametrize("dims", [SMALL, ODD, EIGHT_GROUPS])
def test_gate_on_equal_logits_is_bit_for_bit_the_reference(dims: object) -> None:
    """With ties everywhere: exact comparisons, ties to the lowest index, the sum in rank order."""
    gate: GateConfig = dims.gate  # type: ignore[attr-defined]
    num_experts: int = dims.X  # type: ignore[attr-defined]
    make = Inputs(1, torch.float32)
    logits = torch.cat([torch.zeros(1, num_experts), (make.normal(20, num_experts) * 2).round() / 2])
    bias = (make.normal(num_experts) * 2).round() / 8
    identity = torch.eye(num_experts)
    weights, experts = choose_experts(logits, bias, gate)
    expected_weights, expected_experts = reference_ops().moe_gate(
        logits, reference_ops().pack_linear(identity), bias, gate)
    assert torch.equal(experts, expected_experts)
    assert same_bits(weights, expected_weights)


def test_gate_of_nan_chooses_experts_that_exist() -> None:
    logits = torch.full((2, ODD.X), float("nan"))
    _, experts = choose_experts(logits, torch.zeros(ODD.X), ODD.gate)
    assert ((experts >= 0) & (experts < ODD.X)).all()


@dtypes
def test_a_wider_shared_expert(dtype: torch.dtype) -> None:
    """Its width is a multiple of a routed expert's, as in checkpoints with several shared experts."""
    make, d = Inputs(4, dtype), SMALL
    x, gate_up, down = make.normal(5, d.D), make.weight(d.X, 2 * d.I, d.D), make.weight(d.X, d.D, d.I)
    shared = (make.weight(2 * 3 * d.I, d.D), make.weight(d.D, 3 * d.I))
    weights = torch.rand(5, d.K, generator=make.generator)
    experts = torch.stack([torch.randperm(d.X, generator=make.generator)[: d.K] for _ in range(5)]).int()
    ours, theirs = (
        ops.moe_experts(x, weights, experts, ops.pack_experts(gate_up, down, *shared))
        for ops in (triton_ops(), reference_ops())
    )
    check_op("moe_experts", dtype, ours, theirs)
