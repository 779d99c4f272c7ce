"""Every kernel configuration that serving DeepSeek-V3 launches, as calls for the compile gate.

A case is one call of an op. It states which of its kernels must use Hopper's matrix instructions, and how many bytes
of stack a thread may have: spills. A configuration that is launched for float32 is for checks only, and has no case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gpu_bench.shapes import V3, Maker
from pd_kernels.absorb import triton as absorb
from pd_kernels.block_checksum.triton import piece_checksums
from pd_kernels.block_copy.triton import copy_pieces
from pd_kernels.embed.triton import embed
from pd_kernels.fp8_gemm.triton import fp8_linear
from pd_kernels.latent_write.triton import latent_write
from pd_kernels.linear.triton import linear
from pd_kernels.mla_attention.triton import mla_attention
from pd_kernels.mla_attention.triton_expanded import mla_attention_expanded
from pd_kernels.moe_experts.triton import moe_experts, swiglu
from pd_kernels.moe_gate.triton import moe_gate
from pd_kernels.rms_norm.triton import add_rms_norm, concat_norms, rms_norm
from pd_kernels.sample.triton import log_softmax, sample_tokens
from pd_kernels.verify_drafts.triton import verify_drafts

MATRIX_KERNELS = frozenset({"matmul_kernel", "split_kernel", "expanded_kernel", "gate_up_kernel", "down_kernel"})
FP16 = "fp16"
BF16 = Maker.on("meta")
FEW, MANY = 64, 4096  # rows of a decode step, and of a prompt's chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call.

    Attributes:
        op: the name that the compile gate and the roofline table share.
        name: which call of the op.
        call: runs it on meta tensors.
        stack_bytes: the budget of each kernel that has one; others may have none.
    """

    op: str
    name: str
    call: Callable[[], object]
    stack_bytes: dict[str, int] = field(default_factory=dict)


def cases() -> list[Case]:
    """All of them."""
    return [
        *_attention(), *_experts(), *_projections(), *_fp8(), *_rows(), *_tokens_and_blocks(),
        *(replace(case, name=f"{FP16} {case.name}".rstrip()) for case in _in_fp16()),
    ]


def _in_fp16() -> list[Case]:
    """What an fp16 engine launches: no FP8 latents, and no activations in FP8."""
    make, names = Maker.on("meta", dtype=torch.float16), ("fp8", "fp8 32 tokens", f"fp8 {MANY} tokens")
    every = [*_attention(make), *_experts(make), *_projections(make), *_rows(make, scale=1 / V3.gate.scale)]
    return [
        replace(case, name=case.name.removeprefix("bf16").lstrip()) for case in every if case.name not in names
    ]


def _attention(make: Maker = BF16) -> list[Case]:
    d = V3
    rows, num_blocks = make.rows(d, [4096] * FEW, 1)
    prompt, _ = make.rows(d, [8192], MANY)
    q, absorbed, rope = make.normal(FEW, d.H, d.E), make.absorbed(d), make.rope(d, 8192)
    return [
        Case(op="mla_decode", name="bf16", stack_bytes={"split_kernel": 16},
             call=lambda: mla_attention(q, make.cache(d, num_blocks), rows, d.scale, 0, d.C)),
        Case(op="mla_decode", name="fp8", stack_bytes={"split_kernel": 448},
             call=lambda: mla_attention(q, make.cache(d, num_blocks, fp8=True), rows, d.scale, 0, d.C)),
        Case(op="mla_prefill", name="absorbed", stack_bytes={"split_kernel": 16},
             call=lambda: mla_attention(make.normal(MANY, d.H, d.E), make.cache(d, 512), prompt, d.scale, 0, d.C)),
        Case(op="mla_prefill", name="expanded",
             call=lambda: mla_attention_expanded(make.normal(MANY, d.H * (d.N + d.R)), absorbed, rope,
                                                 make.cache(d, 512), prompt, d.scale, 0)),
    ]


def _experts(make: Maker = BF16) -> list[Case]:
    d = V3
    mixed = {"down_kernel": 112, "gate_up_kernel": 24 if make.dtype == torch.float16 else 0}
    return [
        Case(op="grouped_gemm", name=f"{kind} {num_tokens} tokens",
             stack_bytes=mixed if kind == "fp8 weights" else {},
             call=lambda kind=kind, num_tokens=num_tokens: moe_experts(
                 make.normal(num_tokens, d.D), *make.routing(d, num_tokens), make.experts(d, kind)))
        for kind in ("bf16", "fp8", "fp8 weights") for num_tokens in (32, MANY)
    ]


def _projections(make: Maker = BF16) -> list[Case]:
    d = V3
    shapes = {  # in, out
        "qkv_a": (d.D, d.Q + d.E), "q_b": (d.Q, d.H * (d.N + d.R)), "o": (d.H * d.V, d.D), "eh_proj": (2 * d.D, d.D),
    }
    absorbed, rope = make.absorbed(d), make.rope(d, 8192)
    result = [Case(op="linear", name="head", call=lambda: linear(
        make.normal(FEW, d.D), make.weight(d.Z, d.D), torch.float32))]
    for num_rows in (FEW, MANY):
        result += [
            Case(op="linear", name=f"{name} {num_rows} rows", call=lambda n=num_rows, i=num_in, o=num_out: linear(
                make.normal(n, i), make.weight(o, i)))
            for name, (num_in, num_out) in shapes.items()
        ]
        result += [
            Case(op="linear", name=f"{name}, fp8 weights, {num_rows} rows", stack_bytes={"matmul_kernel": 80},
                 call=lambda n=num_rows, i=num_in, o=num_out: linear(make.normal(n, i), make.fp8_matrix(o, i)))
            for name, (num_in, num_out) in shapes.items() if name in ("qkv_a", "q_b")
        ]
        result += [
            Case(op="linear", name=f"dense mlp {num_rows} rows", call=lambda n=num_rows: swiglu(
                make.normal(n, d.D), make.weight(2 * d.F, d.D), make.weight(d.D, d.F))),
            Case(op="absorb", name=f"queries {num_rows} rows", call=lambda n=num_rows: absorb.mla_queries(
                make.normal(n, d.H * (d.N + d.R)), absorbed, rope, make.integers(0, 8192, n))),
            Case(op="absorb", name=f"values {num_rows} rows", call=lambda n=num_rows: absorb.absorb_values(
                make.normal(n, d.H, d.C), absorbed)),
            Case(op="moe_gate", name=f"{num_rows} rows", call=lambda n=num_rows: moe_gate(
                make.normal(n, d.D), make.weight(d.X, d.D), make.normal(d.X, dtype=torch.float32), d.gate)),
        ]
    return result


def _fp8() -> list[Case]:
    make, d = BF16, V3
    return [
        Case(op="fp8_gemm", name=f"{name} {num_rows} rows", call=lambda n=num_rows, i=num_in, o=num_out: fp8_linear(
            make.normal(n, i), make.fp8_weight(o, i)))
        for name, num_in, num_out in (("qkv_a", d.D, d.Q + d.E), ("q_b", d.Q, d.H * (d.N + d.R)))
        for num_rows in (FEW, MANY)
    ] + [
        Case(op="fp8_gemm", name=f"dense mlp {num_rows} rows", call=lambda n=num_rows: swiglu(
            make.normal(n, d.D), make.fp8_weight(2 * d.F, d.D), make.fp8_weight(d.D, d.F)))
        for num_rows in (FEW, MANY)
    ]


def _rows(make: Maker = BF16, scale: float = 1.0) -> list[Case]:
    """`scale`: of the FP16 guard."""
    d = V3
    x, norm, latent_norm = (
        make.normal(FEW, d.D), make.normal(d.D, dtype=torch.float32), make.normal(d.C, dtype=torch.float32))
    kv = make.normal(FEW, d.Q + d.E)[:, d.Q :]
    rows, _ = make.rows(d, [4096] * FEW, 1)
    return [
        Case(op="embed", name="", call=lambda: embed(make.integers(0, d.Z, FEW), make.normal(d.Z, d.D))),
        Case(op="rms_norm", name="plain", call=lambda: rms_norm(x, norm, 1e-6)),
        Case(op="rms_norm", name="queries", call=lambda: rms_norm(
            make.normal(FEW, d.Q + d.E)[:, : d.Q], make.normal(d.Q, dtype=torch.float32), 1e-6)),
        Case(op="rms_norm", name="with addition", call=lambda: add_rms_norm(
            x, x, norm, 1e-6, x_scale=scale, residual_scale=scale)),
        Case(op="rms_norm", name="two side by side", call=lambda: concat_norms(x, norm, x, norm, 1e-6)),
        Case(op="latent_write", name="bf16", call=lambda: latent_write(
            kv, latent_norm, 1e-6, make.rope(d, 8192), rows, make.cache(d, 512))),
        Case(op="latent_write", name="fp8", call=lambda: latent_write(
            kv, latent_norm, 1e-6, make.rope(d, 8192), rows, make.cache(d, 512, fp8=True))),
    ]


def _tokens_and_blocks() -> list[Case]:
    make, d = BF16, V3

    def wide() -> Tensor:
        return make.integers(0, 2, FEW, dtype=torch.int64)

    def single() -> Tensor:
        return make.normal(FEW, dtype=torch.float32)

    logits = make.normal(FEW, d.Z, dtype=torch.float32)
    memory = make.normal(1 << 20, dtype=torch.uint8)
    return [
        Case(op="sample", name="", call=lambda: sample_tokens(
            logits, single(), make.integers(0, 2, FEW), single(), single(), wide(), wide())),
        Case(op="sample", name="logprobs", call=lambda: log_softmax(logits)),
        Case(op="block_checksum", name="", call=lambda: piece_checksums(memory, wide(), wide())),
        Case(op="block_copy", name="", call=lambda: copy_pieces(memory, memory, wide(), wide(), wide(), 18_432)),
        Case(op="verify_drafts", name="", call=lambda: verify_drafts(
            make.integers(0, 2, FEW, 3), make.integers(0, 2, FEW, 2), make.integers(0, 2, FEW),
            make.integers(0, 2, FEW), make.integers(0, 2, FEW, 4))),
    ]
