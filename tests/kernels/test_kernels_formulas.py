"""The reference against the formulas, written out naively in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pd_kernels.block_checksum import reference as checksum_reference
from pd_kernels.elementary import reference as elementary
from pd_kernels.reference import ReferenceOps
from support import kernel_ops
from support.kernel_cases import ALL_DIMS, EIGHT_GROUPS, ODD, SMALL, Dims, Inputs, PagedRun, PagedSequences, rope_table


@pytest.fixture(scope="module")
def ops() -> ReferenceOps:
    reference = kernel_ops.load("reference")
    assert isinstance(reference, ReferenceOps)
    return reference


@pytest.fixture
def make() -> Inputs:
    return Inputs(7, torch.float32)


def close(a: Tensor, b: Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=1e-5)


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return weight.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def naive_rotate(x: Tensor, position: int) -> Tensor:
    """Complex multiplication of interleaved pairs by e^(i · position · f)."""
    width = x.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(frequencies), position * frequencies)
    return torch.view_as_real(turned).flatten(-2)


def test_exp_log_and_their_friends() -> None:
    x = torch.linspace(-87, 88, 100_001)
    close(elementary.exp(x.clone()) / x.double().exp(), torch.ones_like(x), atol=2e-7)
    close(elementary.silu(x), x.double() * torch.sigmoid(x.double()), atol=1e-5)
    close(elementary.sigmoid(x), torch.sigmoid(x.double()), atol=1e-6)
    y = np.concatenate([np.geomspace(1e-37, 1e37, 100_001), 1 + np.geomspace(1e-7, 0.4, 1000)]).astype(np.float32)
    np.testing.assert_allclose(elementary.log(y), np.log(y.astype(np.float64)), rtol=2e-7, atol=1e-37)
    assert elementary.exp(torch.tensor([float("nan")])).isnan().all()
    assert elementary.exp(torch.tensor([-1e30, 1e30])).isfinite().all()


def test_sum_tree_is_the_stated_order() -> None:
    x = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0])
    assert elementary.sum_tree(x).item() == np.float32(
        np.float32(np.float32(1e8) + np.float32(3.0)) + np.float32(-1e8)) + np.float32(2.0)


def test_norms(ops: ReferenceOps, make: Inputs) -> None:
    x, y, w, v = make.normal(5, 50), make.normal(5, 50), make.normal(50), make.normal(50)
    close(ops.rms_norm(x, w, 1e-3), naive_norm(x, w, 1e-3))
    normed, total = ops.add_rms_norm(x, y, w, 1e-6)
    close(total, x.double() + y.double())
    close(normed, naive_norm(x + y, w, 1e-6))
    close(ops.concat_norms(x, w, y, v, 1e-6), torch.cat([naive_norm(x, w, 1e-6), naive_norm(y, v, 1e-6)], -1))


def test_norm_of_zeros_is_zero(ops: ReferenceOps) -> None:
    assert (ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6) == 0).all()


def test_linear_rounds_once(ops: ReferenceOps) -> None:
    make = Inputs(1, torch.bfloat16)
    x, w = make.normal(9, 100), make.weight(33, 100)
    exact = x.double() @ w.double().T
    rounded = ops.linear(x, ops.pack_linear(w))
    assert rounded.dtype is torch.bfloat16
    close(rounded, exact.float().bfloat16(), atol=2e-2)
    close(ops.linear(x, ops.pack_linear(w), out_dtype=torch.float32), exact)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("first_position", [0, 1])
@pytest.mark.parametrize("dims", ALL_DIMS.values(), ids=ALL_DIMS)
def test_attention_is_multi_head_latent_attention(
    ops: ReferenceOps, dims: Dims, first_position: int, expanded: bool
) -> None:
    """From the papers' expanded formula on unpaged tensors, query by query and head by head."""
    lengths = [70, 3]
    data = PagedSequences(dims, torch.float32, lengths, seed=1, first_position=first_position)
    run = PagedRun(data, ops, block_size=16, seed=2)
    rows = data.rows()
    for row, out in zip(rows, run.step(rows, expanded), strict=True):
        kv = data.kv[row.sequence][: row.position + 1].double()
        c = naive_norm(kv[:, : dims.C], data.norm, 1e-6)
        k_rope = torch.stack([naive_rotate(kv[p, dims.C :], p) for p in range(row.position + 1)])
        q = data.q[row.sequence][row.position].double().view(dims.H, dims.N + dims.R)
        expected = torch.zeros(dims.H, dims.V, dtype=torch.float64)
        for h in range(dims.H):
            if row.position < first_position:
                continue
            keys = torch.cat([c @ data.w_uk[h].double().T, k_rope], dim=-1)[first_position:]
            values = (c @ data.w_uv[h].double().T)[first_position:]
            query = torch.cat([q[h, : dims.N], naive_rotate(q[h, dims.N :], row.position)])
            expected[h] = torch.softmax(keys @ query * data.scale, dim=0) @ values
        close(out, expected.flatten(), atol=1e-4)


def test_latent_write_touches_its_slots_only(ops: ReferenceOps) -> None:
    data = PagedSequences(SMALL, torch.float32, [5], seed=1)
    run = PagedRun(data, ops, block_size=4, seed=2)
    run.step(data.rows()[1:3])
    written = ~run.cache.isnan().any(dim=-1)
    assert written.sum() == 2
    assert written.flatten()[run.place(data.rows()[1:3]).slots_T].all()


@pytest.mark.parametrize("dims", [SMALL, ODD, EIGHT_GROUPS])
@pytest.mark.parametrize("normalize", [False, True])
def test_gate_is_noaux_tc(ops: ReferenceOps, make: Inputs, dims: Dims, normalize: bool) -> None:
    x, w, bias = make.normal(40, dims.D), make.weight(dims.X, dims.D), make.normal(dims.X, scale=0.2)
    config = dims.gate.__class__(
        num_groups=dims.num_groups, num_groups_kept=dims.num_groups_kept, num_experts_per_token=dims.K,
        normalize=normalize, scale=2.5)
    weights, experts = ops.moe_gate(x, ops.pack_linear(w), bias, config)
    size = dims.X // dims.num_groups
    for t in range(len(x)):
        s = torch.sigmoid(x[t].double() @ w.double().T)
        choice = (s + bias.double()).tolist()
        groups = sorted(range(dims.num_groups), key=lambda g: -sum(sorted(choice[g * size : (g + 1) * size])[-2:]))
        allowed = [e for e in range(dims.X) if e // size in groups[: dims.num_groups_kept]]
        best = sorted(allowed, key=lambda e: -choice[e])[: dims.K]
        assert experts[t].tolist() == best
        total = sum(float(s[e]) for e in best) if normalize else 1.0
        close(weights[t], torch.tensor([float(s[e]) / total * 2.5 for e in best]))


def test_gate_breaks_ties_by_the_lowest_index(ops: ReferenceOps) -> None:
    weights, experts = ops.moe_gate(
        torch.zeros(1, 16), ops.pack_linear(torch.zeros(8, 16)), torch.zeros(8), SMALL.gate)
    assert experts.tolist() == [[0, 1, 2]]
    assert experts.dtype is torch.int32
    close(weights, torch.full((1, 3), 2.5 / 3))


def test_experts(ops: ReferenceOps, make: Inputs) -> None:
    d = SMALL
    x = make.normal(6, d.D)
    gate_up, down = make.weight(d.X, 2 * d.I, d.D), make.weight(d.X, d.D, d.I)
    shared_up, shared_down = make.weight(4 * d.I, d.D), make.weight(d.D, 2 * d.I)
    weights = make.normal(6, d.K)
    experts = torch.stack([torch.randperm(d.X, generator=make.generator)[: d.K] for _ in range(6)]).int()

    def mlp(row: Tensor, up: Tensor, out: Tensor) -> Tensor:
        gate, value = (up.double() @ row.double()).chunk(2)
        return out.double() @ (gate * torch.sigmoid(gate) * value)

    y = ops.moe_experts(x, weights, experts, ops.pack_experts(gate_up, down, shared_up, shared_down))
    unshared = ops.moe_experts(x, weights, experts, ops.pack_experts(gate_up, down, None, None))
    for t in range(6):
        routed = sum(
            (float(weights[t, k]) * mlp(x[t], gate_up[e], down[e]) for k, e in enumerate(experts[t].tolist())),
            torch.zeros(d.D, dtype=torch.float64))
        close(unshared[t], routed)
        close(y[t], routed + mlp(x[t], shared_up, shared_down))
        close(ops.swiglu(x, ops.pack_linear(shared_up), ops.pack_linear(shared_down))[t],
              mlp(x[t], shared_up, shared_down))


def test_rope_of_position_zero_is_the_identity() -> None:
    from pd_kernels.rope.reference import rotate

    x = Inputs(0, torch.float32).normal(3, 16)
    assert torch.equal(rotate(x, rope_table(16), torch.zeros(3, dtype=torch.int32)), x)


def test_checksum_is_the_stated_formula() -> None:
    """The definition, in Python integers."""
    mask = 2**64 - 1

    def splitmix64(i: int) -> int:
        z = ((i + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    rng = np.random.default_rng(0)
    for length in (0, 1, 3, 4, 5, 31, 64, 1152):
        piece = rng.bytes(length)
        padded = piece + bytes(-length % 4)
        total = sum(
            int.from_bytes(padded[4 * i : 4 * i + 4], "little") * (splitmix64(i) | 1) for i in range(len(padded) // 4))
        total = (total + length * 0xC2B2AE3D27D4EB4F) & mask
        z = ((total ^ (total >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        assert checksum_reference.checksum(piece) == z ^ (z >> 31)


def test_first_keys_of_the_checksum_are_splitmix64_of_zero() -> None:
    """Known outputs of splitmix64 from state 0."""
    assert checksum_reference.keys()[:2].tolist() == [0xE220A8397B1DCDAF | 1, 0x6E789E6AA1B965F4 | 1]


def test_fp32_logprobs(ops: ReferenceOps) -> None:
    logits = Inputs(0, torch.float32).normal(4, 1001, scale=5.0)
    close(torch.from_numpy(ops.logprobs(logits)), torch.log_softmax(logits.double(), -1), atol=1e-6)
    assert math.isclose(float(np.exp(ops.logprobs(logits).astype(np.float64)).sum(-1)[0]), 1.0, rel_tol=1e-5)
