"""What the ops cannot take is refused by name, by every implementation; empty and odd shapes are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pd_kernels.contract import WrongArgument
from pd_kernels.fp8_matrix import Fp8Matrix
from pd_kernels.index_ranges import OutOfRange
from pd_kernels.ops import GateConfig, Ops, Rows
from pd_kernels.repeat import repeat
from support import kernel_ops
from support.kernel_cases import ODD, PagedRun, PagedSequences, row_ops, same_bits
from support.right_arguments import NUM_POSITIONS, C, Case, D, E, H, K, N, T, V, X, case


@pytest.fixture(params=kernel_ops.names())
def ops(request: pytest.FixtureRequest) -> Ops:
    return kernel_ops.load(request.param)


Call = Callable[[Ops, Case], object]


def gate(groups: int = 2, kept: int = 1, chosen: int = K) -> GateConfig:
    return GateConfig(num_groups=groups, num_groups_kept=kept, num_experts_per_token=chosen, normalize=True, scale=1.0)


def moved(rows: Rows, **fields: list[int] | Tensor) -> Rows:
    """Other values in the same dtypes, or other tensors."""
    return replace(rows, **{
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=getattr(rows, name).dtype)
        for name, value in fields.items()
    })


def linear(ops: Ops, x: Tensor) -> Tensor:
    return ops.linear(x, ops.pack_linear(torch.zeros(5, D)))


def absorbed(ops: Ops) -> object:
    return ops.pack_absorbed(torch.zeros(H, N, C), torch.zeros(H, V, C))


def attend(ops: Ops, c: Case, first_position: int = 0, latent_width: int = C) -> Tensor:
    return ops.mla_attention(c.queries, c.cache, c.rows, 0.2, first_position, latent_width)


def expand(ops: Ops, c: Case) -> Tensor:
    return ops.mla_attention_expanded(c.q, absorbed(ops), c.rope, c.cache, c.rows, 0.2, 0)


def write(ops: Ops, c: Case) -> None:
    ops.latent_write(c.kv, c.latent_norm, 1e-6, c.rope, c.rows, c.cache)


def away(*shape: int) -> Tensor:
    """On a device whose tensors have no memory."""
    return torch.zeros(*shape, device="meta")


def fp8(codes: Tensor | None = None, scales: Tensor | None = None) -> Fp8Matrix:
    """[5, D], but for what is given."""
    return Fp8Matrix(
        codes_MK=torch.ones(5, D).to(torch.float8_e4m3fn) if codes is None else codes,
        scales_Mg=torch.ones(5, 1) if scales is None else scales)


def pack_experts(ops: Ops, up: Tensor | None = None, down: Tensor | None = None, shared_up: Tensor | None = None,
                 shared_down: Tensor | None = None) -> object:
    return ops.pack_experts(
        torch.zeros(X, 10, D) if up is None else up, torch.zeros(X, D, 5) if down is None else down, shared_up,
        shared_down)


def draw(ops: Ops, c: Case, name: str, value: float) -> object:
    """Sampling with one row's parameter changed."""
    values = getattr(c.sampling, name).copy()
    values[2] = value
    return ops.sample(c.logits, replace(c.sampling, **{name: values}))


def experts(ops: Ops, c: Case) -> Tensor:
    packed = ops.pack_experts(torch.zeros(X, 10, D), torch.zeros(X, D, 5), None, None)
    return ops.moe_experts(c.x, c.weights, c.experts, packed)


def choose(ops: Ops, c: Case, config: GateConfig) -> object:
    return ops.moe_gate(c.x, ops.pack_linear(torch.zeros(X, D)), torch.zeros(X), config)


WRONG: dict[str, tuple[str, Call]] = {
    "embed: ids of int32": ("ids_T", lambda o, c: o.embed(torch.zeros(2, dtype=torch.int32), c.x)),
    "embed: every second id": ("ids_T", lambda o, c: o.embed(torch.zeros(4, dtype=torch.int64)[::2], c.x)),
    "embed: a table of columns": ("table_ZD", lambda o, c: o.embed(torch.zeros(2, dtype=torch.int64), c.x.t())),
    "rms_norm: every second number": ("x_TD", lambda o, c: o.rms_norm(torch.zeros(T, 2 * D)[:, ::2], c.norm, 1e-6)),
    "rms_norm: a short weight": ("x_TD must be .*T, 8", lambda o, c: o.rms_norm(c.x, torch.ones(8), 1e-6)),
    "rms_norm: a strided weight": ("weight_D", lambda o, c: o.rms_norm(c.x, torch.ones(2 * D)[::2], 1e-6)),
    "rms_norm: a weight of bf16": ("weight_D", lambda o, c: o.rms_norm(c.x, c.norm.bfloat16(), 1e-6)),
    "add_rms_norm: fewer residual rows": ("residual_TD", lambda o, c: o.add_rms_norm(c.x, c.x[:1], c.norm, 1e-6)),
    "add_rms_norm: residual of fp32": ("residual_TD", lambda o, c: o.add_rms_norm(c.x.bfloat16(), c.x, c.norm, 1e-6)),
    "concat_norms: fewer rows of b": ("b_TD", lambda o, c: o.concat_norms(c.x, c.norm, c.x[:1], c.norm, 1e-6)),
    "concat_norms: a narrower b": ("b_TD", lambda o, c: o.concat_norms(c.x, c.norm, c.x[:, :8], c.norm, 1e-6)),
    "linear: float64": (
        "x_TD must be torch.bfloat16 or torch.float16 or torch.float32", lambda o, c: linear(o, c.x.double())),
    "linear: another width": (r"\[T, 32\]", lambda o, c: linear(o, c.x[:, :31])),
    "linear: three dims": ("x_TD", lambda o, c: linear(o, c.x[None])),
    "linear: a number": ("x_TD", lambda o, c: linear(o, torch.tensor(1.0))),
    "linear: columns": ("each row contiguous", lambda o, c: linear(o, torch.zeros(D, T).t())),
    "linear: on another device": ("on cpu; got .* on meta", lambda o, c: linear(o, torch.zeros(T, D, device="meta"))),
    "pack_linear: float64": ("weight_MD", lambda o, c: o.pack_linear(c.x.double())),
    "pack_linear: empty": ("weight_MD", lambda o, c: o.pack_linear(c.x[:0])),
    "pack_linear: on another device": ("weight_MD must be on .*got on meta", lambda o, c: o.pack_linear(away(5, D))),
    "pack_linear: FP8 on another device": (
        "got on meta", lambda o, c: o.pack_linear(fp8(away(5, D).to(torch.float8_e4m3fn)))),
    "pack_linear: scales on another device": ("got on meta", lambda o, c: o.pack_linear(fp8(scales=away(5, 1)))),
    "pack_linear: too few scales": ("one a row", lambda o, c: o.pack_linear(fp8(scales=torch.ones(1, 1)))),
    "pack_linear: scales of bf16": (
        "float32 scales", lambda o, c: o.pack_linear(fp8(scales=torch.ones(5, 1).bfloat16()))),
    "pack_linear: a scale too large": (
        "weight_MD: scales must be .* 0 to 128", lambda o, c: o.pack_linear(fp8(scales=torch.full((5, 1), 200.0)))),
    "pack_linear: NaN in FP8": (
        "weight_MD: NaN", lambda o, c: o.pack_linear(fp8(torch.full((5, D), torch.nan).to(torch.float8_e4m3fn)))),
    "pack_linear: a negated view": ("negated", lambda o, c: o.pack_linear(torch._neg_view(c.x))),
    "rms_norm: a negated view": ("negated", lambda o, c: o.rms_norm(torch._neg_view(c.x), c.norm, 1e-6)),
    "rms_norm: a negated weight": ("negated", lambda o, c: o.rms_norm(c.x, torch._neg_view(c.norm), 1e-6)),
    "mla_queries: negated positions": ("negated", lambda o, c: o.mla_queries(
        c.q, absorbed(o), c.rope, torch._neg_view(c.rows.positions_T))),
    "pack_absorbed: on another device": (
        "w_uk_HNC .*meta", lambda o, c: o.pack_absorbed(away(H, N, C), torch.zeros(H, V, C))),
    "pack_absorbed: values on another device": (
        "w_uv_HVC .*meta", lambda o, c: o.pack_absorbed(torch.zeros(H, N, C), away(H, V, C))),
    "pack_absorbed: other heads": ("both halves", lambda o, c: o.pack_absorbed(c.cache, c.cache[1:])),
    "pack_experts: other widths": (
        r"must be \[2·I", lambda o, c: o.pack_experts(torch.zeros(X, 10, D), torch.zeros(X, D, 6), None, None)),
    "pack_experts: on another device": ("gate_up_X2ID .*meta", lambda o, c: pack_experts(o, up=away(X, 10, D))),
    "pack_experts: down on another device": ("down_XDI .*meta", lambda o, c: pack_experts(o, down=away(X, D, 5))),
    "pack_experts: half a shared expert": (
        "both its weights", lambda o, c: pack_experts(o, shared_up=torch.zeros(10, D))),
    "pack_experts: a shared expert of three dims": (
        "shared_gate_up", lambda o, c: pack_experts(o, None, None, torch.zeros(1, 10, D), torch.zeros(D, 5))),
    "pack_experts: a shared expert's down of float64": (
        "shared_down", lambda o, c: pack_experts(o, None, None, torch.zeros(10, D), torch.zeros(D, 5).double())),
    "pack_experts: a shared expert of another width": (
        r"must be \[2·I", lambda o, c: pack_experts(o, None, None, torch.zeros(10, D), torch.zeros(D, 6))),
    "mla_queries: another width": ("q_TF", lambda o, c: o.mla_queries(
        c.q[:, 1:], absorbed(o), c.rope, c.rows.positions_T)),
    "mla_queries: positions of int64": ("positions_T", lambda o, c: o.mla_queries(
        c.q, absorbed(o), c.rope, c.rows.positions_T.long())),
    "mla_queries: angles of float64": ("rope_P2R", lambda o, c: o.mla_queries(
        c.q, absorbed(o), c.rope.double(), c.rows.positions_T)),
    "latent_write: a short norm": ("kv_TE", lambda o, c: write(o, replace(c, latent_norm=torch.ones(8)))),
    "latent_write: slots of int32": (
        "slots_T", lambda o, c: write(o, replace(c, rows=moved(c.rows, slots_T=c.rows.slots_T.int())))),
    "latent_write: narrower slots": (
        "cache_GKE", lambda o, c: write(o, replace(c, cache=c.cache[..., 1:].contiguous()))),
    "latent_write: another dtype of slots": (
        "cache_GKE", lambda o, c: write(o, replace(c, cache=c.cache.bfloat16()))),
    "latent_write: FP8 slots of part of a group": (
        "whole groups", lambda o, c: write(o, replace(c, cache=torch.zeros(2, 2, 60, dtype=torch.uint8)))),
    "mla_attention: positions of int64": ("positions_T", lambda o, c: attend(
        o, replace(c, rows=moved(c.rows, positions_T=c.rows.positions_T.long())))),
    "mla_attention: fewer positions": (
        "positions_T", lambda o, c: attend(o, replace(c, rows=moved(c.rows, positions_T=[1])))),
    "mla_attention: sequences of int64": ("sequence_T", lambda o, c: attend(
        o, replace(c, rows=moved(c.rows, sequence_T=c.rows.sequence_T.long())))),
    "mla_attention: fewer sequences": (
        "sequence_T", lambda o, c: attend(o, replace(c, rows=moved(c.rows, sequence_T=[1])))),
    "mla_attention: strided tables": ("block_tables_SB", lambda o, c: attend(
        o, replace(c, rows=moved(c.rows, block_tables_SB=c.rows.block_tables_SB[:, :2])))),
    "mla_attention: a table of one dim": ("block_tables_SB", lambda o, c: attend(
        o, replace(c, rows=moved(c.rows, block_tables_SB=[0, 1])))),
    "mla_attention: before the beginning": ("first_position", lambda o, c: attend(o, c, first_position=-5)),
    "mla_attention: wider than slots": ("latent_width", lambda o, c: attend(o, c, latent_width=E + 1)),
    "mla_attention: blocks without slots": ("cache_GKE|a slot at least", lambda o, c: attend(
        o, replace(c, cache=torch.zeros(3, 0, E)))),
    "mla_attention_expanded: queries of bf16": ("cache_GKE", lambda o, c: expand(o, replace(c, q=c.q.bfloat16()))),
    "mla_attention_expanded: fewer positions": (
        "positions_T", lambda o, c: expand(o, replace(c, rows=moved(c.rows, positions_T=[1])))),
    "mla_attention_expanded: fewer sequences": (
        "sequence_T", lambda o, c: expand(o, replace(c, rows=moved(c.rows, sequence_T=[1])))),
    "absorb_values: other heads": ("o_THC", lambda o, c: o.absorb_values(torch.zeros(T, H + 1, C), absorbed(o))),
    "moe_gate: a short bias": ("bias_X", lambda o, c: o.moe_gate(
        c.x, o.pack_linear(torch.zeros(X, D)), torch.zeros(X - 1), gate())),
    "moe_gate: unequal groups": ("equal groups", lambda o, c: choose(o, c, gate(groups=3))),
    "moe_gate: more than the kept groups have": ("enough", lambda o, c: choose(o, c, gate(chosen=3))),
    "moe_experts: a slice of the experts": (
        "experts_TK", lambda o, c: experts(o, replace(c, experts=c.experts[:, :1], weights=c.weights[:, :1]))),
    "moe_experts: fewer rows of weights": (
        "weights_TK", lambda o, c: experts(o, replace(c, weights=c.weights[:1]))),
    "moe_experts: no expert": (
        "an expert at least",
        lambda o, c: experts(o, replace(c, experts=c.experts[:, :0].clone(), weights=c.weights[:, :0].clone()))),
    "swiglu: weights that do not fit": ("must be ", lambda o, c: o.swiglu(
        c.x, o.pack_linear(torch.zeros(10, D)), o.pack_linear(torch.zeros(D, 6)))),
    "sample: temperatures of float64": ("temperature_T", lambda o, c: o.sample(
        c.logits, replace(c.sampling, temperature_T=np.ones(T)))),  # type: ignore[arg-type]
    "sample: fewer seeds": ("seed_T", lambda o, c: o.sample(
        c.logits, replace(c.sampling, seed_T=np.zeros(1, np.uint64)))),
    "sample: every second top_k": ("top_k_T", lambda o, c: o.sample(
        c.logits, replace(c.sampling, top_k_T=np.ones(2 * T, np.int32)[::2]))),
    "sample: a list of top_k": ("top_k_T must be an array", lambda o, c: o.sample(
        c.logits, replace(c.sampling, top_k_T=[1] * T))),  # type: ignore[arg-type]
    "sample: no temperature": ("temperature_T must be within", lambda o, c: draw(o, c, "temperature_T", np.nan)),
    "sample: below zero": ("temperature_T must be within", lambda o, c: draw(o, c, "temperature_T", -1)),
    "sample: an endless temperature": (
        "temperature_T must be within", lambda o, c: draw(o, c, "temperature_T", np.inf)),
    "sample: a top_k below -1": ("top_k_T must be within", lambda o, c: draw(o, c, "top_k_T", -2)),
    "sample: no top_p": ("top_p_T must be within", lambda o, c: draw(o, c, "top_p_T", np.nan)),
    "sample: a top_p below 0": ("top_p_T must be within", lambda o, c: draw(o, c, "top_p_T", -0.5)),
    "sample: a top_p above 1": ("top_p_T must be within", lambda o, c: draw(o, c, "top_p_T", 1.5)),
    "sample: no min_p": ("min_p_T must be within", lambda o, c: draw(o, c, "min_p_T", np.nan)),
    "sample: a min_p below 0": ("min_p_T must be within", lambda o, c: draw(o, c, "min_p_T", -0.5)),
    "sample: a min_p above 1": ("min_p_T must be within", lambda o, c: draw(o, c, "min_p_T", 1.5)),
    "sample: a position below 0": ("position_T must be within", lambda o, c: draw(o, c, "position_T", -1)),
    "sample: an empty vocabulary": ("logits_TZ", lambda o, c: o.sample(c.logits[:, :0], c.sampling)),
    "logprobs: bf16": ("logits_TZ", lambda o, c: o.logprobs(c.logits.bfloat16())),
}

OUTSIDE: dict[str, tuple[str, Call]] = {
    "a token id": ("row 1: token id 4 .* table of 4", lambda o, c: o.embed(torch.tensor([3, 4]), c.x)),
    "a token id below 0": ("token id -1", lambda o, c: o.embed(torch.tensor([-1]), c.x)),
    "a position": ("row 0: position 64 .* 64 positions", lambda o, c: o.mla_queries(
        c.q, absorbed(o), c.rope, torch.full((T,), NUM_POSITIONS, dtype=torch.int32))),
    "a slot": ("row 3: slot 128", lambda o, c: write(o, replace(c, rows=moved(c.rows, slots_T=[0, 1, 2, 128])))),
    "a slot below 0": ("slot -1", lambda o, c: write(o, replace(c, rows=moved(c.rows, slots_T=[-1, 1, 2, 3])))),
    "a block that is not in the table": ("row 1: position 40 of sequence 0", lambda o, c: attend(
        o, replace(c, rows=moved(c.rows, positions_T=[20, 40, 5, 6])))),
    "a block behind the cache": ("row 0", lambda o, c: attend(
        o, replace(c, rows=moved(c.rows, block_tables_SB=[[8, 1, -1], [2, 3, 4]])))),
    "a position behind the table": ("row 2", lambda o, c: expand(
        o, replace(c, rows=moved(c.rows, positions_T=[20, 21, 48, 5])))),
    "a sequence": ("row 3", lambda o, c: attend(o, replace(c, rows=moved(c.rows, sequence_T=[0, 0, 1, 2])))),
    "an expert": ("row 1: expert 4 .* of 4", lambda o, c: experts(
        o, replace(c, experts=torch.tensor([[0, 1], [2, 4], [0, 1], [0, 1]], dtype=torch.int32)))),
    "an expert below 0": ("expert -1", lambda o, c: experts(o, replace(c, experts=-torch.ones_like(c.experts)))),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_an_op_cannot_take(ops: Ops, name: str) -> None:
    words, call = WRONG[name]
    with pytest.raises(WrongArgument, match=words):
        call(ops, case())


@pytest.mark.parametrize("name", OUTSIDE)
def test_indices_that_lie_outside(ops: Ops, name: str) -> None:
    words, call = OUTSIDE[name]
    with pytest.raises(OutOfRange, match=words):
        call(ops, case())


@pytest.mark.parametrize("name", kernel_ops.compiled_names())
def test_parts_of_wider_rows_where_there_is_no_stride_for_them(name: str) -> None:
    ops, c, wide = kernel_ops.load(name), case(), torch.randn(T, 2 * D)
    for x, residual in ((wide[:, :D], c.x), (c.x, wide[:, :D])):
        with pytest.raises(WrongArgument, match="must be contiguous here"):
            ops.add_rms_norm(x, residual, c.norm, 1e-6)


@pytest.mark.parametrize("name", kernel_ops.compiled_names())
def test_a_weight_of_another_dtype(name: str) -> None:
    """The reference keeps float32 copies, and takes activations of either dtype."""
    ops, c = kernel_ops.load(name), case()
    for call in (
        lambda: linear(ops, c.x.bfloat16()), lambda: experts(ops, replace(c, x=c.x.bfloat16())),
        lambda: choose(ops, replace(c, x=c.x.bfloat16()), gate()),
        lambda: ops.mla_queries(c.q.bfloat16(), absorbed(ops), c.rope, c.rows.positions_T),
    ):
        with pytest.raises(WrongArgument, match=r"must be torch.bfloat16( or FP8)?; got torch.float32"):
            call()


@pytest.mark.parametrize("name", kernel_ops.compiled_names())
def test_fp16_is_not_of_the_compiled_ops(name: str) -> None:
    """Neither activations, nor weights, nor what goes with them: the reference has all of it."""
    ops, c = kernel_ops.load(name), case()
    for call in (
        lambda: linear(ops, c.x.half()), lambda: ops.rms_norm(c.x.half(), c.norm, 1e-6),
        lambda: ops.pack_linear(torch.ones(4, 4).half()),
    ):
        with pytest.raises(WrongArgument, match=r"compute in torch.bfloat16 and torch.float32; got torch.float16"):
            call()
    with pytest.raises(WrongArgument, match="scales are of fp16"):
        ops.add_rms_norm(c.x, c.x, c.norm, 1e-6, x_scale=0.4)
    packed = ops.pack_experts(torch.ones(X, 4, D), torch.ones(X, D, 2), None, None)
    with pytest.raises(WrongArgument, match="a scale is of fp16"):
        ops.moe_experts(c.x, c.weights, c.experts, packed, shared_scale=0.4)


def test_what_is_right_is_taken(ops: Ops) -> None:
    """The case that the others spoil, and activations that are parts of wider rows."""
    c = case()
    write(ops, c)
    attend(ops, c)
    expand(ops, c)
    experts(ops, c)
    choose(ops, c, gate())
    ops.sample(c.logits, c.sampling)
    best = replace(c.sampling, top_p_T=np.zeros(T, np.float32))
    assert ops.sample(c.logits, best).tolist() == c.logits.argmax(dim=1).tolist()
    part = torch.randn(T, D + 5)[:, 3 : D + 3]
    assert same_bits(ops.rms_norm(part, c.norm, 1e-6), ops.rms_norm(part.clone(), c.norm, 1e-6))


@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_row_and_one(ops: Ops, num_rows: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for op in row_ops(ODD, dtype, 1, seed=0).values():
            for result in op(ops, torch.arange(num_rows)):
                assert result.shape[0] == num_rows
    data = PagedSequences(ODD, torch.bfloat16, [3], seed=1)
    run = PagedRun(data, ops, block_size=16, seed=2)
    where = run.place(data.rows()[:num_rows])
    ops.latent_write(data.kv[0][:num_rows], data.norm, 1e-6, data.rope, where, run.cache)
    q = data.q[0][:num_rows]
    assert ops.mla_attention_expanded(q, run.absorbed, data.rope, run.cache, where, 0.1, 0).shape[0] == num_rows
    queries = ops.mla_queries(q, run.absorbed, data.rope, where.positions_T)
    assert ops.mla_attention(queries, run.cache, where, 0.1, 0, ODD.C).shape[0] == num_rows


@pytest.mark.parametrize("name", kernel_ops.compiled_names())
def test_a_repeated_step_of_other_inputs_is_refused(name: str) -> None:
    """More rows than the recording has room for, or tables of an earlier step, must not be read."""
    ops, c = kernel_ops.load(name), case()

    def run(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        return (ops.mla_attention(tensors[0], c.cache, rows, 0.2, 0, C),)

    key = f"hostile-{name}"
    wide = moved(c.rows, block_tables_SB=torch.arange(6, dtype=torch.int32).view(2, 3))
    expected = attend(ops, replace(c, rows=wide))
    assert same_bits(repeat(ops, key, run, (c.queries,), wide)[0], expected)
    for tensor in (c.queries[:3], torch.zeros(200, H, E), c.queries.bfloat16(), c.queries[..., 1:].contiguous()):
        with pytest.raises(WrongArgument, match=r"an input of 4 rows must be torch.float32 .*4, 3, 40"):
            repeat(ops, key, run, (tensor,), wide)
    narrow = moved(c.rows, block_tables_SB=[[0, 1], [2, 3]])  # row 3 stands in a third block
    alone = moved(c.rows, block_tables_SB=[[0, 1, 2]])        # and rows 2 and 3 in a second sequence
    for rows in (narrow, alone):
        with pytest.raises(OutOfRange):
            repeat(ops, key, run, (c.queries,), rows)
    assert same_bits(repeat(ops, key, run, (c.queries,), wide)[0], expected)


@pytest.mark.parametrize("name", kernel_ops.compiled_names())
def test_a_first_step_that_is_refused_is_not_recorded(name: str) -> None:
    ops, c = kernel_ops.load(name), case()

    def run(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        return (ops.embed(tensors[0], c.x),)

    with pytest.raises(OutOfRange, match="row 2: token id 9"):
        repeat(ops, f"first-{name}", run, (torch.tensor([1, 2, 9, 0]),), c.rows)
    assert same_bits(repeat(ops, f"first-{name}", run, (torch.tensor([1, 2, 3, 0]),), c.rows)[0], c.x[[1, 2, 3, 0]])


@pytest.mark.parametrize("name", kernel_ops.compiled_names())
def test_a_first_step_of_wrong_inputs_does_not_bind_the_next(name: str) -> None:
    ops, c, key = kernel_ops.load(name), case(), f"bound-{name}"

    def run(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        return (ops.rms_norm(tensors[0], c.norm, 1e-6),)

    for wrong in (c.x.double(), c.x[:, :8].contiguous(), c.x[:3], torch._neg_view(c.x), c.x.to("meta")):
        with pytest.raises(WrongArgument):
            repeat(ops, key, run, (wrong,), c.rows)
    assert same_bits(repeat(ops, key, run, (c.x,), c.rows)[0], ops.rms_norm(c.x, c.norm, 1e-6))


@pytest.mark.parametrize("name", kernel_ops.compiled_names())
@pytest.mark.parametrize("again", [False, True], ids=["recorded", "repeated"])
def test_a_step_of_inputs_on_another_device(name: str, again: bool) -> None:
    ops, c, key = kernel_ops.load(name), case(), f"away-{name}-{again}"

    def run(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        return (ops.rms_norm(tensors[0], c.norm, 1e-6),)

    if again:
        repeat(ops, key, run, (c.x,), c.rows)
    with pytest.raises(WrongArgument, match=r"an input of 4 rows .* on meta"):
        repeat(ops, key, run, (away(T, D),), c.rows)
    for field in ("positions_T", "sequence_T", "slots_T", "block_tables_SB"):
        for spoil in (lambda tensor: tensor.to("meta"), torch._neg_view):
            with pytest.raises(WrongArgument, match=r"on meta|negated"):
                repeat(ops, key, run, (c.x,), moved(c.rows, **{field: spoil(getattr(c.rows, field))}))
