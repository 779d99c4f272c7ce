"""Recorded steps give the bits of the steps that they repeat, and what cannot be repeated is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from pd_kernels.cpu.recording import MAX_ROWS, StepFunction
from pd_kernels.index_ranges import OutOfRange
from pd_kernels.ops import Ops, Rows
from pd_kernels.repeat import repeat
from support import kernel_ops
from support.kernel_cases import SMALL, Inputs, rope_table, same_bits

DIMS = SMALL
BLOCK_SIZE, NUM_BLOCKS = 4, 40


@pytest.fixture(params=kernel_ops.names())
def ops(request: pytest.FixtureRequest) -> Ops:
    return kernel_ops.load(request.param)


class Layer:
    """One layer's worth of ops over a cache, as a model would call them."""

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        make = Inputs(3, dtype)
        d = DIMS
        self.ops, self.dtype = ops, dtype
        self.q_width = d.H * (d.N + d.R)
        self.table, self.norm = make.normal(d.Z, d.D), make.normal(d.D).float()
        self.latent_norm = make.normal(d.C).float()
        self.fused = ops.pack_linear(make.weight(self.q_width + d.E, d.D))
        self.absorbed = ops.pack_absorbed(make.weight(d.H, d.N, d.C), make.weight(d.H, d.V, d.C))
        self.out = ops.pack_linear(make.weight(d.D, d.H * d.V))
        self.gate, self.bias = ops.pack_linear(make.weight(d.X, d.D)), torch.zeros(d.X)
        self.experts = ops.pack_experts(
            make.weight(d.X, 2 * d.I, d.D), make.weight(d.X, d.D, d.I), make.weight(2 * d.I, d.D),
            make.weight(d.D, d.I))
        self.rope = rope_table(d.R)
        self.cache = make.normal(NUM_BLOCKS, BLOCK_SIZE, d.E)

    def run(self, tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        ops = self.ops
        x = ops.embed(tensors[0], self.table)
        fused = ops.linear(ops.rms_norm(x, self.norm, 1e-6), self.fused)
        ops.latent_write(fused[:, self.q_width :], self.latent_norm, 1e-6, self.rope, rows, self.cache)
        q = ops.mla_queries(fused[:, : self.q_width], self.absorbed, self.rope, rows.positions_T)
        o = ops.absorb_values(ops.mla_attention(q, self.cache, rows, 0.1, 0, DIMS.C), self.absorbed)
        normed, total = ops.add_rms_norm(ops.linear(o, self.out), x, self.norm, 1e-6)
        weights, chosen = ops.moe_gate(normed, self.gate, self.bias, DIMS.gate)
        y = ops.moe_experts(normed, weights, chosen, self.experts)
        return y, ops.concat_norms(y, self.norm, total, self.norm, 1e-6)


def step(num_rows: int, seed: int, num_blocks: int = 3) -> tuple[tuple[Tensor, ...], Rows]:
    """Rows of sequences of their own, at random positions."""
    make = Inputs(seed, torch.float32)
    tables = torch.randperm(NUM_BLOCKS, generator=make.generator)[: num_blocks].int().repeat(num_rows, 1)
    positions = make.integers(0, num_blocks * BLOCK_SIZE, num_rows).int()
    blocks = tables[torch.arange(num_rows), positions.long() // BLOCK_SIZE].long()
    rows = Rows(
        positions_T=positions, sequence_T=torch.arange(num_rows, dtype=torch.int32), block_tables_SB=tables,
        slots_T=blocks * BLOCK_SIZE + positions.long() % BLOCK_SIZE)
    return (make.integers(0, DIMS.Z, num_rows),), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_repeated_steps_give_the_same_bits(ops: Ops, dtype: torch.dtype) -> None:
    """Any number of rows, widths of tables and inputs, again and again: results and cache as without recording."""
    layer, other = Layer(ops, dtype), Layer(ops, dtype)
    for seed, (num_rows, num_blocks) in enumerate(
        [(1, 3), (1, 3), (4, 2), (1, 1), (4, 3), (2, 5), (4, 5), (1, 9), (1, 9), (MAX_ROWS, 3), (MAX_ROWS + 1, 3)]
    ):
        tensors, rows = step(num_rows, seed, num_blocks)
        results = repeat(ops, f"same-bits-{dtype}", layer.run, tensors, rows)
        for result, expected in zip(results, other.run(tensors, rows), strict=True):
            assert same_bits(result, expected), (seed, num_rows, num_blocks)
        assert same_bits(layer.cache, other.cache)


def test_variants_are_recorded_apart(ops: Ops) -> None:
    """As many rows, of which another number goes on: in turns, each with the bits of its own."""
    layer = Layer(ops, torch.float32)

    def last(count: int) -> StepFunction:
        def run(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
            x = ops.rms_norm(ops.embed(tensors[0], layer.table), layer.norm, 1e-6)[-count:]
            return x, ops.linear(x, layer.fused)

        return run

    for seed, count in enumerate([1, 3, 1, 2, 3, 4, 1]):
        tensors, rows = step(4, seed)
        results = repeat(ops, "variants", last(count), tensors, rows, variant=count)
        expected = last(count)(tensors, rows)
        assert results[0].shape[0] == results[1].shape[0] == count
        for result, wanted in zip(results, expected, strict=True):
            assert same_bits(result, wanted), (seed, count)


def test_checksums_by_another_thread_are_no_part_of_a_recording(ops: Ops) -> None:
    """A decode worker verifies what it fetches in threads of its own, while its next step may be the first of its
    kind: whatever the timing, both are right."""
    layer, other = Layer(ops, torch.bfloat16), Layer(ops, torch.bfloat16)
    piece = memoryview(bytes(range(256)) * 9)
    expected = ops.block_checksums([piece])

    def run(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(ops.block_checksums, [piece]).result())
        return layer.run(tensors, rows)

    seen: list[npt.NDArray[np.uint64]] = []
    for seed in range(2):
        tensors, rows = step(2, seed)
        results = repeat(ops, "checksums-meanwhile", run, tensors, rows)
        for result, wanted in zip(results, other.run(tensors, rows), strict=True):
            assert same_bits(result, wanted)
    assert all((checksums == expected).all() for checksums in seen)
    assert seen


def test_a_repeated_step_checks_its_inputs(ops: Ops) -> None:
    layer = Layer(ops, torch.float32)
    tensors, rows = step(2, 0)
    repeat(ops, "checks", layer.run, tensors, rows)
    for bad in (DIMS.Z, -1):
        with pytest.raises(OutOfRange):
            repeat(ops, "checks", layer.run, (torch.tensor([1, bad]),), rows)


@pytest.mark.parametrize("name", kernel_ops.compiled_names())
def test_what_would_not_be_repeated_is_refused(name: str) -> None:
    """A torch function between the ops would be left out by a repetition."""
    ops = kernel_ops.load(name)
    layer = Layer(ops, torch.float32)
    tensors, rows = step(2, 0)

    def with_addition(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        return (ops.rms_norm(ops.embed(tensors[0], layer.table) + 1.0, layer.norm, 1e-6),)

    def with_copy(tensors: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        return (ops.embed(tensors[0][rows.sequence_T.long()], layer.table),)

    for function in (with_addition, with_copy):
        with pytest.raises(AssertionError, match=r"not an op|copies"):
            repeat(ops, function.__name__, function, tensors, rows)
    assert same_bits(ops.embed(tensors[0], layer.table), layer.table[tensors[0]])
