"""Attention over the paged cache: against the reference, for any schedule of rows, and with hostile caches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from pd_kernels.latent_fp8 import reference as latent_fp8
from pd_kernels.latent_write import reference as latent_write
from pd_kernels.ops import Rows
from support.kernel_cases import ALL_DIMS, ODD, SMALL, Dims, PagedRun, PagedSequences, Row, same_bits
from support.triton_cases import check_op, dtypes, reference_ops, triton_ops

from pd_kernels.mla_attention import triton as mla_attention  # isort: skip

INT_MAX = 2**31 - 1
LENGTHS = [130, 1, 71]
SOME_ROWS = [Row(sequence=0, position=p) for p in (0, 1, 63, 64, 129)] + [
    Row(sequence=1, position=0), Row(sequence=2, position=65), Row(sequence=2, position=70)]
forms = pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])


def filled(data: PagedSequences, block_size: int = 16, seed: int = 2) -> PagedRun:
    """A run whose cache holds the latents of all positions, as the reference writes them; NaN in every other slot."""
    run = PagedRun(data, reference_ops(), block_size, seed)
    rows = data.rows()
    kv = torch.stack([data.kv[r.sequence][r.position] for r in rows])
    run.ops.latent_write(kv, data.norm, 1e-6, data.rope, run.place(rows), run.cache)
    return run


def attend(ops: object, run: PagedRun, rows: list[Row], expanded: bool, where: Rows | None = None) -> Tensor:
    """The op under test alone, for the same queries whatever `ops` is: [T, H, C], or [T, H·V] expanded."""
    data, where = run.data, where or run.place(rows)
    q = torch.stack([data.q[r.sequence][r.position] for r in rows])
    absorbed = ops.pack_absorbed(data.w_uk, data.w_uv)  # type: ignore[attr-defined]
    if expanded:
        return ops.mla_attention_expanded(  # type: ignore[attr-defined, no-any-return]
            q, absorbed, data.rope, run.cache, where, data.scale, data.first_position)
    queries = reference_ops().mla_queries(
        q, reference_ops().pack_absorbed(data.w_uk, data.w_uv), data.rope, where.positions_T)
    return ops.mla_attention(  # type: ignore[attr-defined, no-any-return]
        queries, run.cache, where, data.scale, data.first_position, data.dims.C)


@dtypes
@forms
@pytest.mark.parametrize("first_position", [0, 1, 70])
def test_attention_equals_the_reference(dtype: torch.dtype, expanded: bool, first_position: int) -> None:
    run = filled(PagedSequences(ODD, dtype, LENGTHS, seed=1, first_position=first_position))
    ours, theirs = (attend(ops, run, SOME_ROWS, expanded) for ops in (triton_ops(), reference_ops()))
    check_op("mla_attention_expanded" if expanded else "mla_attention", dtype, ours, theirs)
    unseen = [t for t, row in enumerate(SOME_ROWS) if row.position < first_position]
    assert (ours[unseen] == 0).all()


@pytest.mark.slow
@dtypes
@forms
@pytest.mark.parametrize("dims", ["small", "demo", "eight_groups"])
def test_attention_equals_the_reference_for_more_shapes(dtype: torch.dtype, expanded: bool, dims: str) -> None:
    run = filled(PagedSequences(ALL_DIMS[dims], dtype, LENGTHS, seed=1))
    ours, theirs = (attend(ops, run, SOME_ROWS, expanded) for ops in (triton_ops(), reference_ops()))
    check_op("mla_attention_expanded" if expanded else "mla_attention", dtype, ours, theirs)


@dtypes
@forms
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype, expanded: bool) -> None:
    """Alone, among all, with other blocks of another size, and with a context that goes on."""
    data = PagedSequences(ODD, dtype, LENGTHS, seed=3)
    run, elsewhere = filled(data), filled(data, block_size=5, seed=9)
    together = attend(triton_ops(), run, SOME_ROWS, expanded)
    for t in (1, 4, 6):
        assert same_bits(attend(triton_ops(), run, [SOME_ROWS[t]], expanded)[0], together[t])
    assert same_bits(attend(triton_ops(), elsewhere, SOME_ROWS, expanded), together)


@dtypes
@forms
def test_nothing_reaches_a_row_from_slots_it_may_not_see(dtype: torch.dtype, expanded: bool) -> None:
    """NaN and infinity in later slots of its own sequence and in blocks of others; ids that are no blocks beyond it."""
    data = PagedSequences(ODD, dtype, LENGTHS, seed=4)
    run = filled(data)
    rows = [Row(sequence=0, position=p) for p in (3, 20, 64)]
    clean = attend(triton_ops(), run, rows, expanded)
    later = run.place([Row(sequence=0, position=p) for p in range(65, 130)])
    flat = run.cache.view(-1, run.cache.shape[-1])
    flat[later.slots_T] = float("nan")
    flat[later.slots_T[::2]] = float("inf")
    flat[run.place([Row(sequence=2, position=p) for p in range(71)]).slots_T] = float("nan")
    where = run.place(rows)
    assert same_bits(attend(triton_ops(), run, rows, expanded, where), clean)
    if not expanded:  # the expanded form expands what the tables name
        tables = where.block_tables_SB.clone()
        tables[0, 5:], tables[1:] = INT_MAX, -1
        hostile = dataclasses.replace(where, block_tables_SB=tables)
        assert same_bits(attend(triton_ops(), run, rows, expanded, hostile), clean)


@dtypes
@forms
def test_a_poisoned_row_spoils_itself_only(dtype: torch.dtype, expanded: bool) -> None:
    """NaN in slot 20 reaches the rows that see it, and no other row of the same tile."""
    run = filled(PagedSequences(ODD, dtype, [40], seed=5))
    rows = [Row(sequence=0, position=p) for p in (18, 19, 20, 30)]
    clean = attend(triton_ops(), run, rows, expanded)
    run.cache.view(-1, run.cache.shape[-1])[run.place([Row(sequence=0, position=20)]).slots_T] = float("nan")
    spoiled = attend(triton_ops(), run, rows, expanded)
    assert same_bits(spoiled[:2], clean[:2])
    assert spoiled[2:].isnan().all()


@dtypes
def test_splits_at_fixed_positions(dtype: torch.dtype) -> None:
    """Rows on both sides of the ends of splits: against the reference, alone and together, the same bits."""
    run = filled(PagedSequences(ODD, dtype, [200, 129], seed=6, first_position=1))
    rows = [Row(sequence=0, position=p) for p in (0, 63, 64, 127, 128, 199)] + [Row(sequence=1, position=128)]

    def ours(some: list[Row]) -> Tensor:
        data, where = run.data, run.place(some)
        q = torch.stack([data.q[r.sequence][r.position] for r in some])
        queries = triton_ops().mla_queries(q, triton_ops().pack_absorbed(data.w_uk, data.w_uv), data.rope,
                                           where.positions_T)
        return mla_attention.mla_attention(queries, run.cache, where, data.scale, 1, data.dims.C, split=64)

    together = ours(rows)
    check_op("mla_attention", dtype, together, attend(reference_ops(), run, rows, expanded=False))
    for t in (0, 2, 5, 6):
        assert same_bits(ours([rows[t]])[0], together[t])


def test_the_split_that_is_launched() -> None:
    """A context beyond the real split, with rows in bounded passes."""
    dims = Dims(H=2, C=16, R=4, N=4, V=4)
    run = filled(PagedSequences(dims, torch.bfloat16, [mla_attention.SPLIT + 70], seed=7), block_size=64)
    rows = [Row(sequence=0, position=mla_attention.SPLIT + p) for p in (-1, 0, 69)]
    together = attend(triton_ops(), run, rows, expanded=False)
    check_op("mla_attention", torch.bfloat16, together, attend(reference_ops(), run, rows, expanded=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla_attention, "MAX_PARTIAL_BYTES", 1)  # one row a pass
        assert same_bits(attend(triton_ops(), run, rows, expanded=False), together)


@dtypes
def test_latent_write_touches_its_slots_only(dtype: torch.dtype) -> None:
    data = PagedSequences(SMALL, dtype, [40], seed=8)
    ours, theirs = (PagedRun(data, ops, block_size=8, seed=2) for ops in (triton_ops(), reference_ops()))
    rows = data.rows()[3:9] + data.rows()[30:31]
    for run in (ours, theirs):
        kv = torch.stack([data.kv[r.sequence][r.position] for r in rows])
        kv = torch.cat([kv, kv], dim=1)[:, data.dims.E :]  # a slice, as of a fused projection
        run.ops.latent_write(kv, data.norm, 1e-6, data.rope, run.place(rows), run.cache)
    check_op("latent_write", dtype, ours.cache, theirs.cache)
    assert ours.cache.isnan().any(-1).sum() == ours.cache.shape[0] * 8 - len(rows)


FP8_DIMS = Dims(H=2, C=256, R=8, N=8, V=8)


def fp8_run() -> tuple[PagedRun, Tensor]:
    """A filled run in bf16, and the same latents as FP8 slots; all other slots are 0xFF: NaN in any format."""
    run = filled(PagedSequences(FP8_DIMS, torch.bfloat16, [140, 7], seed=9))
    width = latent_fp8.slot_bytes(FP8_DIMS.C, FP8_DIMS.R)
    cache = torch.full((*run.cache.shape[:2], width), 0xFF, dtype=torch.uint8)
    slots = run.place(run.data.rows()).slots_T
    latents = run.cache.view(-1, FP8_DIMS.E)[slots].float()
    cache.view(-1, width)[slots] = latent_fp8.encode(latents, FP8_DIMS.C)
    run.cache.view(-1, FP8_DIMS.E)[slots] = latent_fp8.decode(cache.view(-1, width)[slots], FP8_DIMS.C)
    return run, cache


@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
def test_attention_over_fp8_latents_is_that_over_what_they_stand_for(expanded: bool) -> None:
    run, cache = fp8_run()
    rows = [Row(sequence=0, position=p) for p in (0, 64, 139)] + [Row(sequence=1, position=6)]
    plain = attend(triton_ops(), run, rows, expanded)
    check_op("mla_attention_expanded" if expanded else "mla_attention", torch.bfloat16, plain,
             attend(reference_ops(), run, rows, expanded))
    run.cache = cache
    assert same_bits(attend(triton_ops(), run, rows, expanded), plain)


def test_latent_write_in_fp8() -> None:
    """The bytes are those of the reference's encoding of the latents in float32."""
    data = PagedSequences(FP8_DIMS, torch.bfloat16, [20], seed=10)
    run = PagedRun(data, triton_ops(), block_size=4, seed=1)
    width = latent_fp8.slot_bytes(FP8_DIMS.C, FP8_DIMS.R)
    cache = torch.full((*run.cache.shape[:2], width), 0xFF, dtype=torch.uint8)
    kv, where = torch.stack([data.kv[0][p] for p in range(20)]), run.place(data.rows())
    kv[3, :128] = 0
    kv[4, 5] = 3e4
    triton_ops().latent_write(kv, data.norm, 1e-6, data.rope, where, cache)
    exact = torch.empty(run.cache.shape[0], 4, FP8_DIMS.E, dtype=torch.float32)
    latent_write.latent_write(kv, data.norm, 1e-6, data.rope, where, exact)
    expected = latent_fp8.encode(exact.view(-1, FP8_DIMS.E)[where.slots_T], FP8_DIMS.C)
    written = cache.view(-1, width)[where.slots_T]
    same = (written == expected).float().mean()
    assert same > 0.999, f"{same:.4f} of the bytes agree"  # the norm's sum may differ in its last bit
    decoded, want = (latent_fp8.decode(slots, FP8_DIMS.C).float() for slots in (written, expected))
    assert ((decoded - want).abs() <= want.abs() / 8 + 2**-9).all()
    unwritten = torch.ones(cache.shape[0] * 4, dtype=torch.bool)
    unwritten[where.slots_T] = False
    assert (cache.view(-1, width)[unwritten] == 0xFF).all()


def test_fp8_slots_are_656_bytes_and_round_trip_within_e4m3() -> None:
    assert latent_fp8.slot_bytes(512, 64) == 656
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(50, 576, generator=generator) * torch.logspace(-6, 3, 50)[:, None]
    latents[7, :128] = 0
    slots = latent_fp8.encode(latents, 512)
    decoded = latent_fp8.decode(slots, 512).float()
    largest = latents[:, :512].unflatten(1, (4, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1)
    error = (decoded[:, :512] - latents[:, :512]).abs()
    assert (error <= latents[:, :512].abs() / 16 + largest.clamp(min=1e-4) * 2**-16).all()
    assert torch.equal(decoded[:, 512:], latents[:, 512:].bfloat16().float())
    again = latent_fp8.encode(decoded, 512)
    assert torch.equal(latent_fp8.decode(again, 512).float(), decoded)
