"""fp16 over the Triton kernels: every op against the reference, the guard's scales, and what fp16 does not reach."""

from __future__ import annotations

import pytest
import torch

from support.kernel_cases import ODD, SMALL, Inputs, PagedSequences, Row, row_ops, same_bits
from support.triton_cases import check_op, reference_ops, triton_ops
from triton_kernels.test_triton_attention import attend, filled

FP16 = torch.float16
IN_FP32 = {"sample", "logprobs"}  # they have logits, in whatever dtype the rest is
SLOW = {"moe_experts_unshared", "moe_experts_fp8"}


@pytest.mark.parametrize("op", [
    pytest.param(op, marks=[pytest.mark.slow] if op in SLOW else [])
    for op in row_ops(ODD, FP16, 1, 0) if op not in IN_FP32
])
def test_op_equals_the_reference(op: str) -> None:
    """And a row alone has the bits that it has among others."""
    case = row_ops(ODD, FP16, 3, seed=3)[op]
    results = case(triton_ops(), torch.arange(3))
    for result, expected in zip(results, case(reference_ops(), torch.arange(3)), strict=True):
        check_op(op, FP16, result, expected)
    for alone, whole in zip(case(triton_ops(), torch.tensor([1])), results, strict=True):
        assert same_bits(alone[0], whole[1])


@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
def test_attention_equals_the_reference(expanded: bool) -> None:
    run = filled(PagedSequences(ODD, FP16, [66, 3], seed=1))
    rows = [Row(sequence=0, position=65), Row(sequence=1, position=0), Row(sequence=1, position=2)]
    ours, theirs = (attend(ops, run, rows, expanded) for ops in (triton_ops(), reference_ops()))
    check_op("mla_attention_expanded" if expanded else "mla_attention", FP16, ours, theirs)
    assert same_bits(attend(triton_ops(), run, rows[1:2], expanded)[0], ours[1])


def test_latents_are_written_in_fp16() -> None:
    data = PagedSequences(ODD, FP16, [5], seed=2)
    ours, theirs = filled(data), filled(data)
    ours.cache.fill_(float("nan"))
    rows = data.rows()
    kv = torch.stack([data.kv[row.sequence][row.position] for row in rows])
    triton_ops().latent_write(kv, data.norm, 1e-6, data.rope, ours.place(rows), ours.cache)
    check_op("latent_write", FP16, ours.cache, theirs.cache)


def test_the_sum_before_a_norm_is_scaled_and_rounded_once() -> None:
    """Bit for bit the reference's, where both scales round and where a sum fits that its parts' sum would not."""
    make = Inputs(1, FP16)
    x, residual, weight = make.normal(4, 50), make.normal(4, 50), make.normal(50).float()
    x[1], residual[1] = 60_000, 60_000
    for x_scale, residual_scale in ((0.4, 1.0), (0.4, 0.4)):
        (ours, our_sum), (theirs, their_sum) = (
            ops.add_rms_norm(x, residual, weight, 1.6e-7, x_scale=x_scale, residual_scale=residual_scale)
            for ops in (triton_ops(), reference_ops())
        )
        assert same_bits(our_sum, their_sum)
        check_op("add_rms_norm", FP16, ours, theirs)
        exact = residual.double() * residual_scale + x.double() * x_scale
        assert (our_sum[0].double() - exact[0]).abs().max() <= 1.01 * 2.0**-11 * exact[0].abs().max()
        assert our_sum[1].isfinite().all() == (residual_scale == 0.4)


def test_the_shared_expert_is_scaled() -> None:
    make, d = Inputs(4, FP16), SMALL
    x, gate_up, down = make.normal(3, d.D), make.weight(d.X, 2 * d.I, d.D), make.weight(d.X, d.D, d.I)
    shared = (make.weight(2 * d.I, d.D), make.weight(d.D, d.I))
    weights, experts = torch.rand(3, d.K, generator=make.generator), torch.arange(d.K).repeat(3, 1).int()
    ours, theirs, unscaled = (
        ops.moe_experts(x, weights, experts, ops.pack_experts(gate_up, down, *shared), shared_scale=scale)
        for ops, scale in ((triton_ops(), 0.4), (reference_ops(), 0.4), (reference_ops(), 1.0))
    )
    check_op("moe_experts", FP16, ours, theirs)
    assert (ours.float() - unscaled.float()).abs().max() > 0.1


def test_what_fp16_does_not_reach_is_infinite() -> None:
    """Never a wrong number."""
    ops = triton_ops()
    result = ops.linear(torch.full((1, 4), 300.0, dtype=FP16), torch.full((16, 4), 300.0, dtype=FP16))
    assert result.isinf().all()
