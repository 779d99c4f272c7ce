"""FP8 weights and latents on the CPU: every code, the reference's definition, float32 weights bit for bit, and inputs
that nobody should give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pd_kernels import fp8_matrix
from pd_kernels.contract import WrongArgument
from pd_kernels.fp8_matrix import Fp8Matrix
from pd_kernels.latent_fp8 import reference as latent_fp8
from pd_kernels.ops import Ops, Rows
from pd_kernels.tolerances import check_close
from support import kernel_ops
from support.kernel_cases import DTYPES, FP8_LATENTS, Inputs, PagedRun, PagedSequences, same_bits

REFERENCE = kernel_ops.load("reference")
implementations = pytest.mark.parametrize("implementation", kernel_ops.compiled_names())
everywhere = pytest.mark.parametrize("implementation", kernel_ops.names())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])

C, R = FP8_LATENTS.C, FP8_LATENTS.R
NAN_CODES = (0x7F, 0xFF)


def all_codes() -> Tensor:
    """Every e4m3 number but NaN."""
    codes = torch.tensor([code for code in range(256) if code not in NAN_CODES], dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn)


@implementations
@dtypes
def test_every_code_is_decoded_exactly(implementation: str, dtype: torch.dtype) -> None:
    """Products of a weight of all codes with the unit vectors are its numbers; the scales are no powers of two."""
    codes = all_codes()
    weight = Fp8Matrix.from_blocks(codes.repeat(3, 1), torch.tensor([[0.0173, 3e-9]]))
    ops = kernel_ops.load(implementation)
    columns = ops.linear(torch.eye(254).to(dtype), ops.pack_linear(weight), out_dtype=torch.float32)
    assert torch.equal(columns.T, weight.decode())
    assert torch.equal(weight.decode()[0, :128], codes[:128].float() * torch.tensor(0.0173))


@implementations
@dtypes
@pytest.mark.parametrize(("num_out", "num_in"), [(40, 50), (576, 256), (300, 257), (7, 1100)])
def test_products_are_bit_for_bit_those_of_float32_weights(
    implementation: str, dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    """With few rows, where codes are decoded on the fly, and with many, where a strip of them is decoded first."""
    make, ops = Inputs(1, dtype), kernel_ops.load(implementation)
    weight = make.fp8_matrix(num_out, num_in)
    packed, plain = ops.pack_linear(weight), ops.pack_linear(weight.decode())
    x = make.normal(70, num_in)
    for num_rows in (1, 2, 5, 6, 7, 12, 13, 70):
        result = ops.linear(x[:num_rows], packed, out_dtype=torch.float32)
        assert same_bits(result, ops.linear(x[:num_rows].float(), plain)), num_rows


@everywhere
def test_stacked_matrices_keep_their_own_blocks(implementation: str) -> None:
    """[q_a; kv_a] is one product: a row keeps the scale of the block that it had in its own matrix."""
    make, ops = Inputs(2, torch.bfloat16), kernel_ops.load(implementation)
    parts = [make.fp8_matrix(rows, 200) for rows in (150, 72)]
    stacked = Fp8Matrix(
        codes_MK=torch.cat([part.codes_MK.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
        scales_Mg=torch.cat([part.scales_Mg for part in parts]))
    x = make.normal(5, 200)
    apart = torch.cat([ops.linear(x, ops.pack_linear(part)) for part in parts], dim=1)
    assert same_bits(ops.linear(x, ops.pack_linear(stacked)), apart)


@everywhere
def test_a_block_of_zero_scale_is_zero(implementation: str) -> None:
    make, ops = Inputs(3, torch.float32), kernel_ops.load(implementation)
    weight = make.fp8_matrix(20, 300)
    weight.scales_Mg[:, 1] = 0.0
    x = make.normal(3, 300)
    without = x.clone()
    without[:, 128:256] = 0.0
    packed = ops.pack_linear(weight)
    assert torch.equal(ops.linear(x, packed), ops.linear(without, packed))


@everywhere
@pytest.mark.parametrize("code", NAN_CODES)
def test_weights_of_nan_are_not_packed(implementation: str, code: int) -> None:
    weight = Inputs(4, torch.float32).fp8_matrix(20, 130)
    weight.codes_MK.view(torch.uint8)[19, 129] = code
    with pytest.raises(WrongArgument, match="NaN among the e4m3 numbers"):
        kernel_ops.load(implementation).pack_linear(weight)


@everywhere
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1e-3, 2 * fp8_matrix.MAX_SCALE])
def test_scales_beyond_use_are_not_packed(implementation: str, scale: float) -> None:
    weight = Inputs(4, torch.float32).fp8_matrix(20, 130)
    weight.scales_Mg[3, 1] = scale
    with pytest.raises(WrongArgument, match="scales must be finite and within 0 to 128"):
        kernel_ops.load(implementation).pack_linear(weight)


def rows_in_order(num_rows: int) -> Rows:
    """One sequence's first rows in one block, in order."""
    return Rows(
        positions_T=torch.arange(num_rows, dtype=torch.int32), sequence_T=torch.zeros(num_rows, dtype=torch.int32),
        block_tables_SB=torch.zeros(1, 1, dtype=torch.int32), slots_T=torch.arange(num_rows))


def written(ops: Ops, kv_TE: Tensor) -> Tensor:
    """The slots of some raw latents: uint8 [T, bytes]."""
    cache = torch.zeros(1, kv_TE.shape[0], latent_fp8.slot_bytes(C, R), dtype=torch.uint8)
    rope = torch.stack([torch.ones(kv_TE.shape[0], R // 2), torch.zeros(kv_TE.shape[0], R // 2)], dim=1)
    ops.latent_write(kv_TE, torch.ones(C), 1e-6, rope, rows_in_order(kv_TE.shape[0]), cache)
    return cache[0]


@implementations
@dtypes
def test_written_slots_are_those_of_the_reference(implementation: str, dtype: torch.dtype) -> None:
    """Tiny, huge and mixed magnitudes, zeros, infinity and NaN. A number may differ by a rounding that the order of the
    norm's sum flips: rarely, and by one step."""
    kv = Inputs(5, torch.float32).normal(300, C + R)
    kv[:, :C] *= 10.0 ** torch.linspace(-6, 0, C)  # through e4m3's subnormal numbers to zero
    kv[0, :C], kv[1] = 0.0, kv[1] * 1e-12
    kv[2, 3], kv[3, 5] = float("nan"), float("inf")
    both = (kernel_ops.load(implementation), REFERENCE)
    ours, theirs = (latent_fp8.decode(written(ops, kv.to(dtype)), C) for ops in both)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert bool(ours[2, :C].isnan().all())
    check_close("latent_write_fp8", torch.bfloat16, ours, theirs)
    assert int((ours != theirs)[4:].sum()) <= ours.numel() // 1000


@everywhere
def test_what_is_written_is_the_nearest_number(implementation: str) -> None:
    """Within half a step of e4m3, and on the same side of zero."""
    kv = Inputs(6, torch.float32).normal(50, C + R)
    kv[:, :C] *= 10.0 ** torch.linspace(-3, 0, C)
    exact = kv[:, :C] * torch.rsqrt(kv[:, :C].square().mean(dim=1, keepdim=True) + 1e-6)
    stored = written(kernel_ops.load(implementation), kv)
    back = latent_fp8.decode(stored, C)[:, :C].float()
    scale = stored[:, C : C + 4 * (C // latent_fp8.GROUP)].contiguous().view(torch.float32)
    step = scale.repeat_interleave(latent_fp8.GROUP, dim=1) * 2.0**-9
    assert ((back - exact).abs() <= torch.maximum(exact.abs() / 16, step / 2) * 1.0001).all()
    assert torch.equal(scale.log2(), scale.log2().round())


@implementations
@dtypes
@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("first_position", [0, 1])
def test_attention_over_slots_is_that_over_what_they_stand_for(
    implementation: str, dtype: torch.dtype, expanded: bool, first_position: int
) -> None:
    """Bit for bit; and within tolerance that of the reference over the same slots."""
    data = PagedSequences(FP8_LATENTS, dtype, [130, 1, 71], seed=1, first_position=first_position, fp8=True)
    ours, theirs = (PagedRun(data, ops, block_size=16, seed=2) for ops in (kernel_ops.load(implementation), REFERENCE))
    rows = data.rows()
    kv = torch.stack([data.kv[r.sequence][r.position] for r in rows])
    q = torch.stack([data.q[r.sequence][r.position] for r in rows])
    where = ours.place(rows)
    theirs.ops.latent_write(kv, data.norm, 1e-6, data.rope, where, theirs.cache)
    cache = theirs.cache
    latents = latent_fp8.decode(cache.flatten(0, 1), C).to(dtype).view(*cache.shape[:2], -1)
    results = []
    for run, stored in ((ours, cache), (ours, latents), (theirs, cache)):
        if expanded:
            results.append(run.ops.mla_attention_expanded(
                q, run.absorbed, data.rope, stored, where, data.scale, first_position))
        else:
            queries = REFERENCE.mla_queries(q, theirs.absorbed, data.rope, where.positions_T)
            results.append(run.ops.mla_attention(queries, stored, where, data.scale, first_position, C))
    assert same_bits(results[0], results[1])
    check_close("mla_attention_expanded" if expanded else "mla_attention", dtype, results[0], results[2])


@implementations
@dtypes
@pytest.mark.parametrize("scale", [
    1.0, 2.0**-22, 2.0**7, 2.0**8, 2.0**-64, 2.0**-70, 2.0**100, 0.37, 3e-5, -0.5, 0.0, float("nan"), float("inf")])
def test_a_reader_takes_any_scale(implementation: str, dtype: torch.dtype, scale: float) -> None:
    """A row that sees one slot gets its numbers: code · scale as bf16 holds it."""
    slots = torch.zeros(1, 1, latent_fp8.slot_bytes(C, R), dtype=torch.uint8)
    slots[0, 0, : len(all_codes())] = all_codes().view(torch.uint8)
    slots[0, 0, C : C + 8] = torch.tensor([scale, scale]).view(torch.uint8)
    expected = latent_fp8.decode(slots[0], C)[:, :C].to(dtype)
    ops = kernel_ops.load(implementation)
    result = ops.mla_attention(torch.zeros(1, 1, C + R, dtype=dtype), slots, rows_in_order(1), 1.0, 0, C)[:, 0]
    if scale == scale and abs(scale) != float("inf"):
        assert torch.equal(result, expected)
    else:  # its scores are NaN, and so is all of the row
        assert bool(result.isnan().all())


@everywhere
@pytest.mark.parametrize("code", NAN_CODES)
def test_nan_and_zero_scales_in_a_slot_stay_with_the_rows_that_see_it(implementation: str, code: int) -> None:
    ops, make = kernel_ops.load(implementation), Inputs(7, torch.bfloat16)
    cache = written(REFERENCE, make.normal(8, C + R)).unsqueeze(0)
    q = make.normal(8, FP8_LATENTS.H, C + R)
    clean = ops.mla_attention(q, cache, rows_in_order(8), 0.1, 0, C)
    cache[0, 5, 17] = code
    spoiled = ops.mla_attention(q, cache, rows_in_order(8), 0.1, 0, C)
    assert same_bits(spoiled[:5], clean[:5])
    assert bool(spoiled[5:].isnan().all())
    cache[0, 5, C : C + 4] = 0  # the scale of the group: 0 · NaN is NaN
    assert bool(ops.mla_attention(q, cache, rows_in_order(8), 0.1, 0, C)[5:].isnan().all())
    cache[0, 5, 17] = 0x7E
    assert bool(ops.mla_attention(q, cache, rows_in_order(8), 0.1, 0, C).isfinite().all())


@implementations
def test_slots_of_another_width_are_refused(implementation: str) -> None:
    ops = kernel_ops.load(implementation)
    with pytest.raises(WrongArgument, match="cache_GKE"):
        ops.latent_write(torch.zeros(1, C + R), torch.ones(C), 1e-6, torch.zeros(1, 2, R // 2), rows_in_order(1),
                         torch.zeros(1, 1, C + R, dtype=torch.uint8))
