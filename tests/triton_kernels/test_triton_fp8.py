"""FP8: quantization bit for bit, and block-scaled products, alone and of experts, against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pd_kernels.fp8_gemm.reference import Fp8Weight, fp8_expert
from pd_kernels.fp8_gemm.reference import fp8_linear as reference_linear
from pd_kernels.fp8_quant import reference as quant_reference
from support.kernel_cases import Inputs, same_bits
from support.triton_cases import check_op, dtypes, triton_ops

from pd_kernels.fp8_quant import triton as quant  # isort: skip
from pd_kernels.moe_experts.triton import Experts  # isort: skip

scales = pytest.mark.parametrize("power_of_two", [False, True], ids=["amax", "ue8m0"])


def fp8_weight(make: Inputs, *shape: int, power_of_two: bool = False) -> Fp8Weight:
    """A random weight [M, K] or [X, M, K]."""
    dense = make.weight(*shape).float()
    parts = [quant_reference.quantize_weight(part) for part in dense.view(-1, *shape[-2:])]
    values = torch.stack([value.view(torch.uint8) for value, _ in parts]).view(torch.float8_e4m3fn)
    scale = torch.stack([scale for _, scale in parts])
    return Fp8Weight(weight_MK=values.view(shape), scale_mk=scale.view(*shape[:-2], *scale.shape[1:]),
                     power_of_two=power_of_two)


def expert_of(weight: Fp8Weight, index: int) -> Fp8Weight:
    return Fp8Weight(weight_MK=weight.weight_MK[index], scale_mk=weight.scale_mk[index],
                     power_of_two=weight.power_of_two)


@dtypes
@scales
@pytest.mark.parametrize("num_in", [128, 200, 1100])
def test_quantization_is_bit_for_bit_the_reference(dtype: torch.dtype, power_of_two: bool, num_in: int) -> None:
    make = Inputs(num_in, dtype)
    x = make.normal(7, num_in) * torch.logspace(-8, 8, 7)[:, None].to(dtype)
    x[0] = 0
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    ours, theirs = (module.fp8_quant(x, power_of_two) for module in (quant, quant_reference))
    assert torch.equal(ours[0].float().isnan(), theirs[0].float().isnan())
    assert torch.equal(ours[0].float().nan_to_num(), theirs[0].float().nan_to_num())
    assert same_bits(ours[1], theirs[1])


def test_quantized_activations_stand_for_what_they_were() -> None:
    x = Inputs(1, torch.float32).normal(20, 384) * 5
    for power_of_two in (False, True):
        back = quant_reference.dequantize_activations(*quant_reference.fp8_quant(x, power_of_two))
        assert ((back - x).abs() <= x.abs() / 16 + 1e-3).all()


def test_weights_with_ragged_blocks_stand_for_what_they_were() -> None:
    weight = Inputs(2, torch.float32).weight(576, 200)
    values, scale = quant_reference.quantize_weight(weight)
    assert scale.shape == (5, 2)
    back = quant_reference.dequantize_weight(values, scale)
    assert ((back - weight).abs() <= weight.abs() / 16 + 1e-3).all()


@dtypes
@scales
@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), [
    (3, 128, 128), (5, 200, 70), (9, 1100, 130), pytest.param(600, 1024, 40, marks=pytest.mark.slow),
    pytest.param(140, 256, 300, marks=pytest.mark.slow),
])
def test_linear(dtype: torch.dtype, power_of_two: bool, num_rows: int, num_in: int, num_out: int) -> None:
    make = Inputs(3, dtype)
    x = make.normal(num_rows, num_in)
    stored = fp8_weight(make, num_out, num_in)
    weight = triton_ops().pack_fp8_linear(stored.weight_MK, stored.scale_mk, power_of_two=power_of_two)
    result = triton_ops().linear(x, weight)
    check_op("fp8_linear", dtype, result, reference_linear(x, weight))
    assert same_bits(triton_ops().linear(x[-1:].clone(), weight), result[-1:])


@dtypes
@pytest.mark.parametrize("num_rows", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_experts(dtype: torch.dtype, num_rows: int) -> None:
    """Two of five experts a token, and a shared one."""
    make = Inputs(4, dtype)
    x = make.normal(num_rows, 200)
    gate_up, down = fp8_weight(make, 6, 256, 200), fp8_weight(make, 6, 200, 128)
    weights = torch.rand(num_rows, 2, generator=make.generator)
    experts = torch.stack([torch.randperm(5, generator=make.generator)[:2] for _ in range(num_rows)]).int()
    packed = Experts(gate_up=gate_up, down=down, num_shared=1)
    result = triton_ops().moe_experts(x, weights, experts, packed)

    def expected(t: int) -> Tensor:
        chosen = [*experts[t].tolist(), 5]
        parts = [fp8_expert(x[t : t + 1], expert_of(gate_up, e), expert_of(down, e))[0] for e in chosen]
        return parts[0] * weights[t, 0] + parts[1] * weights[t, 1] + parts[2]

    check_op("fp8_expert", dtype, result, torch.stack([expected(t) for t in range(num_rows)]).to(dtype))
    alone = triton_ops().moe_experts(x[-1:].clone(), weights[-1:].clone(), experts[-1:].clone(), packed)
    assert same_bits(alone, result[-1:])


@dtypes
def test_dense_mlp(dtype: torch.dtype) -> None:
    make = Inputs(5, dtype)
    x, gate_up, down = make.normal(5, 128), fp8_weight(make, 512, 128), fp8_weight(make, 128, 256)
    check_op("fp8_expert", dtype, triton_ops().swiglu(x, gate_up, down), fp8_expert(x, gate_up, down).to(dtype))
