"""What is timed on a GPU: calls of the ops at DeepSeek-V3's shapes, with the work that each must do at least.

Bytes count each input read once and each output written once; workspaces of a kernel do not count. FLOPs are those of
the formula, a multiplication and an addition counted as two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from gpu_bench.shapes import V3, Dims, Maker
from pd_kernels.absorb import triton as absorb
from pd_kernels.block_checksum.triton import piece_checksums
from pd_kernels.block_copy.triton import copy_pieces
from pd_kernels.embed.triton import embed
from pd_kernels.fp8_gemm.triton import fp8_linear
from pd_kernels.fp8_quant.triton import fp8_quant
from pd_kernels.latent_fp8.reference import slot_bytes
from pd_kernels.latent_write.triton import latent_write
from pd_kernels.linear.triton import linear
from pd_kernels.mla_attention.triton import mla_attention
from pd_kernels.mla_attention.triton_expanded import mla_attention_expanded
from pd_kernels.moe_experts.triton import moe_experts
from pd_kernels.moe_gate.triton import moe_gate
from pd_kernels.rms_norm.triton import add_rms_norm
from pd_kernels.sample.triton import log_softmax, sample_tokens
from pd_kernels.verify_drafts.triton import verify_drafts

Call = Callable[[], object]
BF16_BYTES = 2
L2_BYTES = 60_000_000  # of an H200: what is read again within so many bytes does not come from memory
SETS, MANY_SETS = 8, 32  # of inputs, computed with in turn: together a few times that, where one is large or small


class Goal(Enum):
    """What a figure is held against."""

    COPY = "the copy"
    MATMUL = "cuBLAS"
    TFLOPS = "TFLOP/s"
    NONE = "no goal"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCase:
    """One line of the table.

    Attributes:
        flops, num_bytes: the least work of one call.
        units: what computes the FLOPs: bf16 or FP8 matrix units, or plain float32.
        goal, goal_value: at least that share, or that many TFLOP/s.
        prepare: makes the inputs and returns calls on different ones, to be timed in turn.
    """

    op: str
    name: str
    dtype: str
    num_rows: int
    flops: float
    num_bytes: float
    units: str
    goal: Goal = Goal.NONE
    goal_value: float = 0.0
    prepare: Callable[[Maker], list[Call]]


def bench_cases(d: Dims = V3, *, tiny: bool = False) -> list[BenchCase]:
    """All lines, the most telling first. `tiny` shrinks counts and contexts, for a dry run."""
    cases: list[BenchCase] = []
    contexts = (40, 70) if tiny else (4096, 32768)
    for context in contexts:
        batches = (1, 2) if tiny else (1, 16, 64, 128, 256)
        cases += [_decode(d, batch, context, queries, fp8=False) for batch in batches for queries in (1, 2)]
        cases.append(_decode(d, 2 if tiny else 64, context, 1, fp8=True))
        few_heads = replace(d, H=1 if tiny else 16)  # with V3's 128 heads attention is never bound by memory
        cases.append(_decode(few_heads, 2 if tiny else 64, context, 1, fp8=False))
    for tokens in (1, 5, 9) if tiny else (32, 256, 4096):
        cases += [_experts(d, tokens), _gate(d, tokens)]
    for tokens in (20,) if tiny else (1024, 4096, 16384):
        cases += [_prefill(d, tokens, expanded=False), _prefill(d, tokens, expanded=True)]
    for tokens in (5,) if tiny else (1, 64, 4096):
        cases += _linears(d, tokens)
    tokens = 7 if tiny else 4096
    cases += [_embed(d, tokens), _norm(d, tokens), _write(d, tokens, fp8=False), _write(d, tokens, fp8=True)]
    cases += [_sample(d, 3 if tiny else 256), _log_softmax(d, 3 if tiny else 256)]
    cases += [_checksum(d, 4 if tiny else 16384), _copy(d, 4 if tiny else 16384), _quant(d, tokens)]
    cases.append(_verify(3 if tiny else 256))
    for tokens in (5,) if tiny else (64, 4096):
        cases += [_fp8_linear(d, tokens, is_mixed=True), _fp8_linear(d, tokens, is_mixed=False)]
    for tokens in (5,) if tiny else (32, 4096):
        cases += [_experts(d, tokens, "fp8 weights"), _experts(d, tokens, "fp8")]
    return cases


def _decode(d: Dims, batch: int, context: int, queries: int, *, fp8: bool) -> BenchCase:
    num_rows = batch * queries
    flops = 2.0 * num_rows * d.H * context * (d.E + d.C)
    cache_bytes = batch * context * (slot_bytes(d.C, d.R) if fp8 else d.E * BF16_BYTES)
    num_bytes = cache_bytes + num_rows * d.H * (d.E + d.C) * BF16_BYTES
    memory_bound = flops / num_bytes < 200
    kind = ("" if d.H == V3.H else f", {d.H} heads") + (", FP8" if fp8 else "")

    def prepare(make: Maker) -> list[Call]:
        rows, num_blocks = make.rows(d, [context] * batch, queries)
        num_caches = MANY_SETS if cache_bytes < L2_BYTES else 2 if cache_bytes < 8 * L2_BYTES else 1
        caches = [make.cache(d, num_blocks, fp8=fp8) for _ in range(num_caches)]
        return [
            partial(mla_attention, make.normal(num_rows, d.H, d.E), cache, rows, d.scale, 0, d.C)
            for cache in (caches if len(caches) > 1 else caches * 2)
        ]

    return BenchCase(
        op="mla_decode", units="bf16",
        name=f"batch {batch}, context {context}, {queries} query tokens{kind}",
        dtype="fp8" if fp8 else "bf16", num_rows=num_rows, flops=flops, num_bytes=num_bytes,
        goal=Goal.COPY if memory_bound else Goal.TFLOPS, goal_value=0.8 if memory_bound else 300.0, prepare=prepare)


def _prefill(d: Dims, tokens: int, *, expanded: bool) -> BenchCase:
    pairs = tokens * (tokens + 1) / 2
    if expanded:
        flops = 2.0 * d.H * pairs * (d.N + d.R + d.V) + 2.0 * tokens * d.C * d.H * (d.N + d.V)
        num_bytes = tokens * (d.E + d.H * (d.N + d.R + d.V)) * BF16_BYTES
    else:
        flops = 2.0 * d.H * pairs * (d.E + d.C)
        num_bytes = tokens * (d.E + d.H * (d.E + d.C)) * BF16_BYTES

    def prepare(make: Maker) -> list[Call]:
        rows, num_blocks = make.rows(d, [tokens], tokens)
        cache = make.cache(d, num_blocks)
        if not expanded:
            return [partial(mla_attention, make.normal(tokens, d.H, d.E), cache, rows, d.scale, 0, d.C)]
        weight, rope = make.absorbed(d), make.rope(d, tokens)
        plain = make.normal(tokens, d.H * (d.N + d.R))
        return [partial(mla_attention_expanded, plain, weight, rope, cache, rows, d.scale, 0)]

    return BenchCase(
        op="mla_prefill", units="bf16", name=f"{tokens} tokens, {'expanded' if expanded else 'absorbed'}",
        dtype="bf16",
        num_rows=tokens, flops=flops, num_bytes=num_bytes, goal=Goal.MATMUL, goal_value=0.5, prepare=prepare)


def _experts(d: Dims, tokens: int, kind: str = "bf16") -> BenchCase:
    """`kind`: see `Maker.experts`."""
    distinct = d.X * (1 - (1 - d.K / d.X) ** tokens) + 1  # of independent choices, on average, and the shared one
    weight_bytes = distinct * 3 * d.D * d.I * (BF16_BYTES if kind == "bf16" else 1)
    compute_bound = tokens >= 4096

    def prepare(make: Maker) -> list[Call]:
        experts = make.experts(d, kind)
        return [
            partial(moe_experts, make.normal(tokens, d.D), *make.routing(d, tokens), experts) for _ in range(4)
        ]

    return BenchCase(
        op="grouped_gemm", units="fp8" if kind == "fp8" else "bf16",
        name=f"{tokens} tokens, {d.X} experts{', FP8 weights' if kind == 'fp8 weights' else ''}",
        dtype="bf16" if kind == "bf16" else "fp8", num_rows=tokens,
        flops=2.0 * 3 * tokens * (d.K + 1) * d.D * d.I, num_bytes=weight_bytes + 2 * tokens * d.D * BF16_BYTES,
        goal=Goal.MATMUL if compute_bound and kind != "fp8" else Goal.NONE, goal_value=0.6, prepare=prepare)


def _gate(d: Dims, tokens: int) -> BenchCase:
    def prepare(make: Maker) -> list[Call]:
        bias = make.normal(d.X, dtype=torch.float32, scale=0.1)
        return [
            partial(moe_gate, make.normal(tokens, d.D), make.weight(d.X, d.D), bias, d.gate) for _ in range(MANY_SETS)
        ]

    return BenchCase(
        op="moe_gate", units="bf16", name=f"{tokens} tokens",
        dtype="bf16", num_rows=tokens, flops=2.0 * tokens * d.X * d.D,
        num_bytes=(tokens + d.X) * d.D * BF16_BYTES + tokens * d.K * 8, goal=Goal.COPY, goal_value=0.7,
        prepare=prepare)


def _linears(d: Dims, tokens: int) -> list[BenchCase]:
    shapes = {"qkv_a": (d.D, d.Q + d.E), "q_b": (d.Q, d.H * (d.N + d.R)), "o": (d.H * d.V, d.D)}
    cases = [_linear(name, tokens, num_in, num_out) for name, (num_in, num_out) in shapes.items()]
    for name, queries in (("queries", True), ("values", False)):
        def prepare(make: Maker, queries: bool = queries) -> list[Call]:
            weights, rope = [make.absorbed(d) for _ in range(SETS)], make.rope(d, 4096)
            if queries:
                positions = make.integers(0, 4096, tokens)
                return [
                    partial(absorb.mla_queries, make.normal(tokens, d.H * (d.N + d.R)), weight, rope, positions)
                    for weight in weights
                ]
            return [partial(absorb.absorb_values, make.normal(tokens, d.H, d.C), weight) for weight in weights]

        narrow, wide = (d.N, d.C + 2 * d.R) if queries else (d.V, d.C)
        cases.append(BenchCase(
            op="absorb", units="bf16", name=f"{name}, {tokens} rows",
        dtype="bf16", num_rows=tokens,
            flops=2.0 * tokens * d.H * d.N * d.C,
            num_bytes=(d.H * d.N * d.C + tokens * d.H * (narrow + wide)) * BF16_BYTES, prepare=prepare))
    return cases


def _linear(name: str, tokens: int, num_in: int, num_out: int) -> BenchCase:
    def prepare(make: Maker) -> list[Call]:
        return [partial(linear, make.normal(tokens, num_in), make.weight(num_out, num_in)) for _ in range(SETS)]

    return BenchCase(
        op="linear", units="bf16", name=f"{name}, {tokens} rows",
        dtype="bf16", num_rows=tokens,
        flops=2.0 * tokens * num_in * num_out,
        num_bytes=(tokens * (num_in + num_out) + num_in * num_out) * BF16_BYTES, prepare=prepare)


def _fp8_linear(d: Dims, tokens: int, *, is_mixed: bool) -> BenchCase:
    """`is_mixed`: activations as they are."""
    num_in, num_out = d.Q, d.H * (d.N + d.R)

    def prepare(make: Maker) -> list[Call]:
        if is_mixed:
            return [partial(linear, make.normal(tokens, num_in), make.fp8_matrix(num_out, num_in)) for _ in range(SETS)]
        return [
            partial(fp8_linear, make.normal(tokens, num_in), make.fp8_weight(num_out, num_in)) for _ in range(SETS)
        ]

    return BenchCase(
        op="linear" if is_mixed else "fp8_gemm", units="bf16" if is_mixed else "fp8",
        name=f"q_b, {tokens} rows{', FP8 weights' if is_mixed else ''}",
        dtype="fp8", num_rows=tokens, flops=2.0 * tokens * num_in * num_out,
        num_bytes=num_in * num_out + tokens * (num_in + num_out) * BF16_BYTES, prepare=prepare)


def _embed(d: Dims, tokens: int) -> BenchCase:
    def prepare(make: Maker) -> list[Call]:
        table = make.normal(d.Z, d.D)
        return [partial(embed, make.integers(0, d.Z, tokens), table) for _ in range(2)]

    return BenchCase(
        op="embed", units="fp32", name=f"{tokens} rows", dtype="bf16", num_rows=tokens, flops=0.0,
        num_bytes=tokens * (2.0 * d.D * BF16_BYTES + 4), prepare=prepare)


def _verify(num_sequences: int) -> BenchCase:
    """With two drafts each, and four tokens that end a sequence."""
    def prepare(make: Maker) -> list[Call]:
        def some(*shape: int) -> Tensor:
            return make.integers(0, 2, *shape)

        return [partial(verify_drafts, some(num_sequences, 3), some(num_sequences, 2), some(num_sequences),
                        some(num_sequences), some(num_sequences, 4)) for _ in range(2)]

    return BenchCase(
        op="verify_drafts", units="fp32", name=f"{num_sequences} sequences", dtype="int32", num_rows=num_sequences,
        flops=0.0, num_bytes=4.0 * num_sequences * (3 + 2 + 1 + 1 + 4 + 1), prepare=prepare)


def _norm(d: Dims, tokens: int) -> BenchCase:
    def prepare(make: Maker) -> list[Call]:
        weight = make.normal(d.D, dtype=torch.float32)
        return [
            partial(add_rms_norm, make.normal(tokens, d.D), make.normal(tokens, d.D), weight, 1e-6) for _ in range(2)
        ]

    return BenchCase(
        op="rms_norm", units="fp32", name=f"with addition, {tokens} rows",
        dtype="bf16", num_rows=tokens, flops=6.0 * tokens * d.D,
        num_bytes=4.0 * tokens * d.D * BF16_BYTES, goal=Goal.COPY, goal_value=0.7, prepare=prepare)


def _write(d: Dims, tokens: int, *, fp8: bool) -> BenchCase:
    slot = slot_bytes(d.C, d.R) if fp8 else d.E * BF16_BYTES

    def prepare(make: Maker) -> list[Call]:
        rows, num_blocks = make.rows(d, [tokens], tokens)
        weight, rope = make.normal(d.C, dtype=torch.float32), make.rope(d, tokens)
        caches = [make.cache(d, num_blocks, fp8=fp8) for _ in range(MANY_SETS)]
        return [partial(latent_write, make.normal(tokens, d.E), weight, 1e-6, rope, rows, cache) for cache in caches]

    return BenchCase(
        op="latent_write", units="fp32", name=f"{tokens} rows{', FP8' if fp8 else ''}",
        dtype="fp8" if fp8 else "bf16",
        num_rows=tokens, flops=8.0 * tokens * d.E, num_bytes=float(tokens * (d.E * BF16_BYTES + slot + 8 * d.R // 2)),
        goal=Goal.COPY, goal_value=0.7, prepare=prepare)


def _logits(make: Maker, d: Dims, num_rows: int) -> Tensor:
    return make.normal(num_rows, d.Z, dtype=torch.float32, scale=3.0)


def _sample(d: Dims, num_rows: int) -> BenchCase:
    def prepare(make: Maker) -> list[Call]:
        temperature = torch.full((num_rows,), 0.7).to(make.device)
        top_k, top_p = torch.full((num_rows,), -1).int().to(make.device), torch.ones(num_rows).to(make.device)
        min_p = torch.zeros(num_rows).to(make.device)
        seed = torch.arange(num_rows).to(make.device)
        return [
            partial(sample_tokens, _logits(make, d, num_rows), temperature, top_k, top_p, min_p, seed, seed)
            for _ in range(2)
        ]

    return BenchCase(
        op="sample", units="fp32", name=f"temperature, {num_rows} rows",
        dtype="fp32", num_rows=num_rows,
        flops=100.0 * num_rows * d.Z, num_bytes=4.0 * num_rows * d.Z, goal=Goal.COPY, goal_value=0.7, prepare=prepare)


def _log_softmax(d: Dims, num_rows: int) -> BenchCase:
    def prepare(make: Maker) -> list[Call]:
        return [partial(log_softmax, _logits(make, d, num_rows)) for _ in range(2)]

    return BenchCase(
        op="sample", units="fp32", name=f"logprobs, {num_rows} rows",
        dtype="fp32", num_rows=num_rows, flops=20.0 * num_rows * d.Z,
        num_bytes=8.0 * num_rows * d.Z, prepare=prepare)


def _checksum(d: Dims, num_pieces: int) -> BenchCase:
    length = d.block_size * d.E * BF16_BYTES

    def prepare(make: Maker) -> list[Call]:
        memory = make.integers(0, 256, num_pieces * length, dtype=torch.uint8)
        offsets = (torch.arange(num_pieces) * length).to(make.device)
        lengths = torch.full((num_pieces,), length).to(make.device)
        return [partial(piece_checksums, memory, offsets, lengths)]

    return BenchCase(
        op="block_checksum", units="fp32", name=f"{num_pieces} pieces of {length} bytes",
        dtype="bytes", num_rows=num_pieces,
        flops=2.0 * num_pieces * length / 4, num_bytes=float(num_pieces * length), prepare=prepare)


def _copy(d: Dims, num_pieces: int) -> BenchCase:
    length = d.block_size * d.E * BF16_BYTES

    def prepare(make: Maker) -> list[Call]:
        source = make.integers(0, 256, num_pieces * length, dtype=torch.uint8)
        target = torch.zeros_like(source)
        offsets = torch.arange(num_pieces) * length
        shuffled = offsets[torch.randperm(num_pieces, generator=torch.Generator().manual_seed(0))].to(make.device)
        lengths, offsets = torch.full((num_pieces,), length).to(make.device), offsets.to(make.device)
        return [partial(copy_pieces, source, target, shuffled, offsets, lengths, length)]

    return BenchCase(
        op="block_copy", units="fp32", name=f"{num_pieces} scattered pieces of {length} bytes",
        dtype="bytes", num_rows=num_pieces,
        flops=0.0, num_bytes=2.0 * num_pieces * length, prepare=prepare)


def _quant(d: Dims, tokens: int) -> BenchCase:
    def prepare(make: Maker) -> list[Call]:
        return [partial(fp8_quant, make.normal(tokens, d.D), False) for _ in range(SETS)]

    return BenchCase(
        op="fp8_quant", units="fp32", name=f"{tokens} rows",
        dtype="fp8", num_rows=tokens, flops=3.0 * tokens * d.D,
        num_bytes=tokens * d.D * (BF16_BYTES + 1 + 4 / 128), prepare=prepare)
