"""Inputs for tests of the ops: random weights and activations of any dimensions, and paged caches full of NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pd_kernels.fp8_matrix import Fp8Matrix, Weight
from pd_kernels.fp8_quant.reference import quantize_weight
from pd_kernels.latent_fp8.reference import slot_bytes
from pd_kernels.ops import GateConfig, Ops, Packed, Rows, SamplingRows

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Dimensions of a model's ops; letters as in pd_kernels.ops."""

    D: int = 96
    H: int = 4
    N: int = 32
    R: int = 16
    C: int = 64
    V: int = 24
    X: int = 8
    K: int = 3
    I: int = 40  # noqa: E741
    num_groups: int = 4
    num_groups_kept: int = 2
    Z: int = 301

    @property
    def E(self) -> int:
        return self.C + self.R

    @property
    def gate(self) -> GateConfig:
        return GateConfig(
            num_groups=self.num_groups, num_groups_kept=self.num_groups_kept, num_experts_per_token=self.K,
            normalize=True, scale=2.5,
        )


SMALL = Dims()
DEMO = Dims(D=256, H=8, N=32, R=64, C=512, V=32, X=16, K=4, I=128, num_groups=4, num_groups_kept=2, Z=4096)
ODD = Dims(D=50, H=3, N=20, R=8, C=72, V=20, X=6, K=2, I=21, num_groups=1, num_groups_kept=1, Z=77)
EIGHT_GROUPS = Dims(D=64, H=5, N=16, R=32, C=96, V=16, X=16, K=6, I=48, num_groups=8, num_groups_kept=4, Z=130)
ALL_DIMS = {"small": SMALL, "demo": DEMO, "odd": ODD, "eight_groups": EIGHT_GROUPS}
FP8_LATENTS = Dims(D=50, H=3, N=20, R=8, C=256, V=20)  # whole groups of 128
MAX_POSITIONS = 512


class Inputs:
    """Random tensors from one seed, in one dtype."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """Scaled so that a product with it keeps the magnitude of its input."""
        return self.normal(*shape, scale=shape[-1] ** -0.5)

    def fp8_matrix(self, *shape: int) -> Fp8Matrix:
        """A random weight [M, K] or [X, M, K], each matrix in blocks of its own."""
        parts = [quantize_weight(part) for part in self.weight(*shape).float().view(-1, *shape[-2:])]
        codes = torch.stack([code.view(torch.uint8) for code, _ in parts]).view(torch.float8_e4m3fn)
        scale = torch.stack([scale for _, scale in parts])
        return Fp8Matrix.from_blocks(codes.view(shape), scale.view(*shape[:-2], *scale.shape[1:]))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)


RowOp = Callable[[Ops, Tensor], list[Tensor]]  # indices of rows -> result rows


@functools.lru_cache(maxsize=8)  # a test for each op asks for the same ones, of two dtypes and four models
def row_ops(dims: Dims, dtype: torch.dtype, num_rows: int, seed: int) -> dict[str, RowOp]:
    """Every op whose rows depend on themselves alone, closed over fixed inputs of `num_rows` rows.

    Called with the indices of some rows it computes the op on those rows, in that order.
    """
    make = Inputs(seed, dtype)
    x, other = make.normal(num_rows, dims.D), make.normal(num_rows, dims.D)
    norm, norm_b = make.normal(dims.D).float(), make.normal(dims.D).float()
    ids, table = make.integers(0, dims.Z, num_rows), make.normal(dims.Z, dims.D)
    projection = make.weight(dims.H * 7 + 9, dims.D)
    head = make.weight(dims.Z, dims.D)
    w_uk, w_uv = make.weight(dims.H, dims.N, dims.C), make.weight(dims.H, dims.V, dims.C)
    q = make.normal(num_rows, dims.H * (dims.N + dims.R))
    rope = rope_table(dims.R)
    positions = make.integers(0, MAX_POSITIONS, num_rows).int()
    latents = make.normal(num_rows, dims.H, dims.C)
    gate, bias = make.weight(dims.X, dims.D), make.normal(dims.X, scale=0.1).float()
    gate_up, down = make.weight(dims.X, 2 * dims.I, dims.D), make.weight(dims.X, dims.D, dims.I)
    shared = (make.weight(2 * dims.I, dims.D), make.weight(dims.D, dims.I))
    dense_up, dense_down = make.weight(6 * dims.I, dims.D), make.weight(dims.D, 3 * dims.I)
    fp8 = Inputs(seed, dtype)
    fp8_projection = fp8.fp8_matrix(dims.H * 7 + 9, dims.D)
    fp8_dense = (fp8.fp8_matrix(6 * dims.I, dims.D), fp8.fp8_matrix(dims.D, 3 * dims.I))
    fp8_experts = (
        fp8.fp8_matrix(dims.X, 2 * dims.I, dims.D), fp8.fp8_matrix(dims.X, dims.D, dims.I),
        fp8.fp8_matrix(2 * dims.I, dims.D), fp8.fp8_matrix(dims.D, dims.I),
    )
    routing = Inputs(seed, torch.float32)
    weights_TK = routing.normal(num_rows, dims.K).abs()
    experts_TK = torch.stack([
        torch.randperm(dims.X, generator=routing.generator)[: dims.K] for _ in range(num_rows)
    ] or [torch.empty(dims.K)]).int()[:num_rows]
    logits = make.normal(num_rows, dims.Z, scale=3.0).float()
    sampling = sampling_rows(num_rows, seed)
    weights: dict[object, Packed] = {}

    def packed(ops: Ops, method: str, *tensors: Weight | None) -> Packed:
        """The weight as these ops pack it, packed once."""
        key = (ops.name, method, *map(id, tensors))
        if key not in weights:
            weights[key] = getattr(ops, method)(*tensors)
        return weights[key]

    return {
        "embed": lambda ops, t: [ops.embed(ids[t], table)],
        "rms_norm": lambda ops, t: [ops.rms_norm(x[t], norm, 1e-6)],
        "add_rms_norm": lambda ops, t: list(ops.add_rms_norm(x[t], other[t], norm, 1e-6)),
        "concat_norms": lambda ops, t: [ops.concat_norms(x[t], norm, other[t], norm_b, 1e-6)],
        "linear": lambda ops, t: [ops.linear(x[t], packed(ops, "pack_linear", projection))],
        "head": lambda ops, t: [ops.linear(x[t], packed(ops, "pack_linear", head), out_dtype=torch.float32)],
        "mla_queries": lambda ops, t: [ops.mla_queries(
            q[t], packed(ops, "pack_absorbed", w_uk, w_uv), rope, positions[t])],
        "absorb_values": lambda ops, t: [ops.absorb_values(latents[t], packed(ops, "pack_absorbed", w_uk, w_uv))],
        "moe_gate": lambda ops, t: list(ops.moe_gate(x[t], packed(ops, "pack_linear", gate), bias, dims.gate)),
        "moe_experts": lambda ops, t: [ops.moe_experts(
            x[t], weights_TK[t], experts_TK[t], packed(ops, "pack_experts", gate_up, down, *shared))],
        "moe_experts_unshared": lambda ops, t: [ops.moe_experts(
            x[t], weights_TK[t], experts_TK[t], packed(ops, "pack_experts", gate_up, down, None, None))],
        "swiglu": lambda ops, t: [ops.swiglu(
            x[t], packed(ops, "pack_linear", dense_up), packed(ops, "pack_linear", dense_down))],
        "linear_fp8": lambda ops, t: [ops.linear(x[t], packed(ops, "pack_linear", fp8_projection))],
        "moe_experts_fp8": lambda ops, t: [ops.moe_experts(
            x[t], weights_TK[t], experts_TK[t], packed(ops, "pack_experts", *fp8_experts))],
        "swiglu_fp8": lambda ops, t: [ops.swiglu(x[t], *(packed(ops, "pack_linear", part) for part in fp8_dense))],
        "sample": lambda ops, t: [torch.from_numpy(ops.sample(logits[t], pick(sampling, t)))],
        "logprobs": lambda ops, t: [torch.from_numpy(ops.logprobs(logits[t]))],
    }


def rope_table(R: int, num_positions: int = MAX_POSITIONS) -> Tensor:
    """[P, 2, R/2]: cosines and sines of plain RoPE."""
    frequencies = 10000.0 ** (-torch.arange(0, R, 2).double() / R)
    angles = torch.arange(num_positions).double()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def sampling_rows(num_rows: int, seed: int) -> SamplingRows:
    """Rows of every kind: greedy, plain, top-k, top-p, min-p and any of them together."""
    rng = np.random.default_rng(seed)
    return SamplingRows(
        temperature_T=rng.choice(np.array([0.0, 0.3, 0.8, 1.0, 2.5], np.float32), num_rows),
        top_k_T=rng.choice(np.array([-1, 1, 3, 40, 10_000], np.int32), num_rows),
        top_p_T=rng.choice(np.array([1.0, 0.95, 0.5, 1e-6], np.float32), num_rows),
        min_p_T=rng.choice(np.array([0.0, 0.0, 1e-30, 0.02, 0.5, 1.0], np.float32), num_rows),
        seed_T=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        position_T=rng.integers(0, 2**40, num_rows, dtype=np.int64),
    )


def pick(rows: SamplingRows, indices: Tensor) -> SamplingRows:
    t = indices.numpy()
    return SamplingRows(
        temperature_T=rows.temperature_T[t], top_k_T=rows.top_k_T[t], top_p_T=rows.top_p_T[t],
        min_p_T=rows.min_p_T[t], seed_T=rows.seed_T[t], position_T=rows.position_T[t],
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One query row: its sequence and position."""

    sequence: int
    position: int


class PagedSequences:
    """The raw inputs of attention for whole sequences, and caches of any block size to compute them in.

    `lengths[s]` positions of sequence s each have one query and one raw latent (kv_a's output). With `fp8` the caches
    hold FP8 slots.
    """

    def __init__(
        self, dims: Dims, dtype: torch.dtype, lengths: list[int], seed: int, first_position: int = 0,
        fp8: bool = False,
    ) -> None:
        make = Inputs(seed, dtype)
        self.fp8 = fp8
        self.dims, self.dtype, self.lengths, self.first_position = dims, dtype, lengths, first_position
        self.rope = rope_table(dims.R, max([*lengths, 1]))
        self.w_uk, self.w_uv = make.weight(dims.H, dims.N, dims.C), make.weight(dims.H, dims.V, dims.C)
        self.norm = make.normal(dims.C).float()
        self.kv = [make.normal(length, dims.E) for length in lengths]
        self.q = [make.normal(length, dims.H * (dims.N + dims.R), scale=1.5) for length in lengths]
        self.scale = (dims.N + dims.R) ** -0.5

    def rows(self) -> list[Row]:
        return [Row(sequence=s, position=p) for s, length in enumerate(self.lengths) for p in range(length)]


class PagedRun:
    """One way to compute `PagedSequences`: a block size, a placement of blocks, and steps of any rows."""

    def __init__(self, data: PagedSequences, ops: Ops, block_size: int, seed: int) -> None:
        self.data, self.ops, self.block_size = data, ops, block_size
        self.absorbed = ops.pack_absorbed(data.w_uk, data.w_uv)
        counts = [-(-length // block_size) for length in data.lengths]
        num_blocks = sum(counts) + 2
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()
        self.tables = torch.full((len(counts), max([*counts, 1])), -1, dtype=torch.int32)
        start = 0
        for s, count in enumerate(counts):
            self.tables[s, :count] = ids[start : start + count]
            start += count
        if data.fp8:  # all ones are NaN in every part of a slot
            width = slot_bytes(data.dims.C, data.dims.R)
            self.cache = torch.full((num_blocks, block_size, width), 0xFF, dtype=torch.uint8)
        else:
            self.cache = torch.full((num_blocks, block_size, data.dims.E), float("nan"), dtype=data.dtype)

    def step(self, rows: list[Row], expanded: bool = False) -> Tensor:
        """Writes the latents of the rows, then attends them: [T, H·V]."""
        data, ops = self.data, self.ops
        kv = torch.stack([data.kv[r.sequence][r.position] for r in rows])
        q = torch.stack([data.q[r.sequence][r.position] for r in rows])
        where = self.place(rows)
        ops.latent_write(kv, data.norm, 1e-6, data.rope, where, self.cache)
        if expanded:
            return ops.mla_attention_expanded(
                q, self.absorbed, data.rope, self.cache, where, data.scale, data.first_position)
        queries = ops.mla_queries(q, self.absorbed, data.rope, where.positions_T)
        out = ops.mla_attention(
            queries, self.cache, where, data.scale, data.first_position, data.dims.C)
        return ops.absorb_values(out, self.absorbed)

    def place(self, rows: list[Row]) -> Rows:
        positions = torch.tensor([r.position for r in rows], dtype=torch.int32)
        sequence = torch.tensor([r.sequence for r in rows], dtype=torch.int32)
        blocks = self.tables[sequence.long(), positions.long() // self.block_size].long()
        return Rows(positions_T=positions, sequence_T=sequence, block_tables_SB=self.tables,
                    slots_T=blocks * self.block_size + positions.long() % self.block_size)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality: NaN equals itself, and 0 is not -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
