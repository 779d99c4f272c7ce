"""Calls of each op at the size of the tiny DeepSeek-V3, for `kernels measure`.

Shape suffixes as in pd_kernels.ops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pd_kernels.fp8_matrix import Fp8Matrix, scale_shape
from pd_kernels.latent_fp8.reference import encode
from pd_kernels.ops import GateConfig, Ops, Rows, SamplingRows
from pd_ops.bench.kernel_list import Figure
from pd_ops.bench.models import TINY_V3

CASE, HEAD_CASE, FP8_CASE = "tiny V3", "tiny V3, head", "tiny V3, FP8"
CONTEXT = 512       # slots that a row attends to
BLOCK_SIZE = 16
MIN_CPU_S = 0.01
REPEATS = 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EPS = 1e-6

D, H, R, C = (TINY_V3[name] for name in ("hidden_size", "num_attention_heads", "qk_rope_head_dim", "kv_lora_rank"))
N, V, X, I = (  # noqa: E741
    TINY_V3[name] for name in ("qk_nope_head_dim", "v_head_dim", "n_routed_experts", "moe_intermediate_size")
)
K, Z, E = TINY_V3["num_experts_per_tok"], TINY_V3["vocab_size"], C + R
GATE = GateConfig(
    num_groups=TINY_V3["n_group"], num_groups_kept=TINY_V3["topk_group"], num_experts_per_token=K, normalize=True,
    scale=2.5,
)

Call = Callable[[], object]


def measure_ops(
    all_ops: Sequence[Ops], *, dtypes: Sequence[str], row_counts: Sequence[int], note: Callable[[str], None],
    min_cpu_s: float = MIN_CPU_S,
) -> list[Figure]:
    """The best of a few turns of each call; implementations take turns."""
    figures = []
    for dtype in dtypes:
        for num_rows in row_counts:
            note(f"{dtype}, {num_rows} rows")
            calls = [
                (op, case, ops.name, call)
                for ops in all_ops for op, case, call in op_calls(ops, DTYPES[dtype], num_rows)
            ]
            best: dict[tuple[str, str, str], float] = {}
            for _ in range(REPEATS):
                for op, case, name, call in calls:
                    seconds = _seconds_a_call(call, min_cpu_s)
                    best[op, case, name] = min(seconds, best.get((op, case, name), seconds))
            figures += [
                Figure(
                    op=op, implementation=name, dtype=dtype, case=case, num_rows=num_rows,
                    microseconds=round(1e6 * seconds, 2),
                )
                for (op, case, name), seconds in best.items()
            ]
    return sorted(
        figures, key=lambda one: (one.op, one.case, one.dtype, one.num_rows, one.implementation)
    )


def op_calls(ops: Ops, dtype: torch.dtype, num_rows: int) -> Iterator[tuple[str, str, Call]]:
    """(op, case, a call of it on `num_rows` rows), for what an implementation of `Ops` has."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    x, norm = normal(num_rows, D), torch.ones(D)
    ids, embedding = torch.arange(num_rows) % Z, normal(Z, D)
    projection, head = ops.pack_linear(normal(E, D, scale=D**-0.5)), ops.pack_linear(normal(Z, D, scale=D**-0.5))
    absorbed = ops.pack_absorbed(normal(H, N, C, scale=N**-0.5), normal(H, V, C, scale=C**-0.5))
    experts = ops.pack_experts(
        normal(X, 2 * I, D, scale=D**-0.5), normal(X, D, I, scale=I**-0.5), normal(2 * I, D, scale=D**-0.5),
        normal(D, I, scale=I**-0.5),
    )
    gate, bias = ops.pack_linear(normal(X, D, scale=D**-0.5)), torch.zeros(X)
    weights_TK, experts_TK = ops.moe_gate(x, gate, bias, GATE)
    queries, latents = normal(num_rows, H * (N + R)), normal(num_rows, H, C)
    rows, cache, rope = _rows(num_rows), normal(CONTEXT // BLOCK_SIZE, BLOCK_SIZE, E), _rope_table()
    absorbed_queries = ops.mla_queries(queries, absorbed, rope, rows.positions_T)
    kv, latent_norm = normal(num_rows, E), torch.ones(C)
    logits, sampling = torch.randn(num_rows, Z, generator=generator), _sampling(num_rows)
    pieces = [memoryview(bytes(BLOCK_SIZE * E * dtype.itemsize))] * num_rows
    yield "embed", CASE, lambda: ops.embed(ids, embedding)
    yield "rms_norm", CASE, lambda: ops.rms_norm(x, norm, EPS)
    yield "linear", CASE, lambda: ops.linear(x, projection)
    yield "linear", HEAD_CASE, lambda: ops.linear(x, head, out_dtype=torch.float32)
    yield "absorb", CASE, lambda: ops.absorb_values(latents, absorbed)
    yield "latent_write", CASE, lambda: ops.latent_write(kv, latent_norm, EPS, rope, rows, cache)
    yield "mla_attention", CASE, lambda: ops.mla_attention(absorbed_queries, cache, rows, (N + R) ** -0.5, 0, C)
    yield "moe_gate", CASE, lambda: ops.moe_gate(x, gate, bias, GATE)
    yield "moe_experts", CASE, lambda: ops.moe_experts(x, weights_TK, experts_TK, experts)
    yield "sample", CASE, lambda: ops.sample(logits, sampling)
    yield "block_checksum", CASE, lambda: ops.block_checksums(pieces)
    yield from _fp8_calls(ops, x, (weights_TK, experts_TK), absorbed_queries, kv)


def _fp8_calls(
    ops: Ops, x: Tensor, routing: tuple[Tensor, Tensor], queries: Tensor, kv: Tensor
) -> Iterator[tuple[str, str, Call]]:
    """The ops that take FP8 weights, or a cache of FP8 slots, on the same rows."""
    projection = ops.pack_linear(_fp8(E, D))
    experts = ops.pack_experts(_fp8(X, 2 * I, D), _fp8(X, D, I), _fp8(2 * I, D), _fp8(D, I))
    rows, rope, latent_norm = _rows(x.shape[0]), _rope_table(), torch.ones(C)
    latents = torch.randn(CONTEXT, E, generator=torch.Generator().manual_seed(0))
    cache = encode(latents, C).view(CONTEXT // BLOCK_SIZE, BLOCK_SIZE, -1)
    yield "linear", FP8_CASE, lambda: ops.linear(x, projection)
    yield "moe_experts", FP8_CASE, lambda: ops.moe_experts(x, *routing, experts)
    yield "latent_write", FP8_CASE, lambda: ops.latent_write(kv, latent_norm, EPS, rope, rows, cache)
    yield "mla_attention", FP8_CASE, lambda: ops.mla_attention(queries, cache, rows, (N + R) ** -0.5, 0, C)


def _fp8(*shape: int) -> Fp8Matrix:
    """Random codes, none of them NaN, with one scale for all."""
    codes = torch.randint(0, 0x7E, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    rows, columns = scale_shape(*shape[-2:])
    return Fp8Matrix.from_blocks(codes.view(torch.float8_e4m3fn), torch.full((*shape[:-2], rows, columns), 1e-3))


def _rows(num_rows: int) -> Rows:
    """Rows that stand at the end of one sequence of `CONTEXT` slots, the last ones over again if there are more."""
    positions = torch.arange(CONTEXT - num_rows, CONTEXT).clamp(min=0)
    return Rows(
        positions_T=positions.int(), sequence_T=torch.zeros(num_rows, dtype=torch.int32),
        block_tables_SB=torch.arange(CONTEXT // BLOCK_SIZE, dtype=torch.int32)[None], slots_T=positions.long(),
    )


def _rope_table() -> Tensor:
    angles = torch.arange(CONTEXT).double()[:, None] * 10000.0 ** (-torch.arange(0, R, 2).double() / R)
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def _sampling(num_rows: int) -> SamplingRows:
    return SamplingRows(
        temperature_T=np.full(num_rows, 0.7, dtype=np.float32), top_k_T=np.full(num_rows, -1, dtype=np.int32),
        top_p_T=np.full(num_rows, 1.0, dtype=np.float32), min_p_T=np.zeros(num_rows, dtype=np.float32),
        seed_T=np.arange(num_rows, dtype=np.uint64),
        position_T=np.arange(num_rows, dtype=np.int64),
    )


def _seconds_a_call(call: Call, min_cpu_s: float) -> float:
    """CPU seconds, over as many calls as take `min_cpu_s`."""
    num_calls, began_s = 0, time.process_time()
    while True:
        call()
        num_calls += 1
        passed_s = time.process_time() - began_s
        if passed_s >= min_cpu_s:
            return passed_s / num_calls
