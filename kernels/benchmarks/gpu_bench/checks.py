"""Correctness on the device, before anything is timed: against the references on the CPU, in float32, on fresh inputs.

The inputs and the list of ops are those of the tests (tests/support/kernel_cases.py). Beside the tolerance table, rows
must have the same bits alone, in small and large tiles, and in prompts as in decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_bench.steps import shortened
from pd_engine.cache.device_arena import DeviceArena
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_kernels.block_checksum import reference as checksum_reference
from pd_kernels.block_checksum.triton import piece_checksums
from pd_kernels.block_copy.triton import copy_pieces
from pd_kernels.fp8_gemm.reference import Fp8Weight, fp8_expert
from pd_kernels.fp8_gemm.reference import fp8_linear as reference_fp8_linear
from pd_kernels.fp8_gemm.triton import fp8_linear
from pd_kernels.fp8_quant import reference as quant_reference
from pd_kernels.fp8_quant.triton import fp8_quant
from pd_kernels.latent_fp8 import reference as latent_fp8
from pd_kernels.moe_experts.triton import Experts, moe_experts
from pd_kernels.ops import Rows
from pd_kernels.reference import ReferenceOps
from pd_kernels.tolerances import check_close
from pd_kernels.triton_ops import TritonOps
from pd_kernels.verify_drafts import reference as verify_reference
from pd_kernels.verify_drafts.triton import verify_drafts
from support.kernel_cases import DEMO, ODD, Dims, PagedRun, PagedSequences, Row, RowOp, row_ops, same_bits

LOOK_CHARACTERS = 600  # of what one look has found
WIDE = Dims(D=7168, H=128, N=128, R=64, C=512, V=128, X=16, K=8, I=2048, num_groups=8, num_groups_kept=4, Z=8192)
TABLE_NAMES = {
    "linear": "linear_on_matrix_units", "head": "linear_on_matrix_units", "linear_fp8": "linear_on_matrix_units",
    "mla_attention": "mla_attention_on_matrix_units",
    "mla_attention_expanded": "mla_attention_expanded_on_matrix_units", "moe_experts_unshared": "moe_experts",
    "moe_experts_fp8": "moe_experts", "swiglu_fp8": "swiglu",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Raises AssertionError with what is wrong."""

    name: str
    run: Callable[[], None]


class OnDevice:
    """`TritonOps` for callers whose tensors are on the CPU: moves arguments there and results back."""

    def __init__(self, ops: TritonOps) -> None:
        self._ops = ops
        self.name = ops.name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        function = getattr(self._ops, method)

        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*(moved(argument, self._ops.device) for argument in arguments), **options)
            return result if method.startswith("pack") else moved(result, torch.device("cpu"))

        return call

    def latent_write(self, *arguments: Any) -> None:
        cache = arguments[-1]
        on_device = cache.to(self._ops.device, copy=True)
        self._ops.latent_write(*(moved(argument, self._ops.device) for argument in arguments[:-1]), on_device)
        cache.copy_(on_device)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, and those in tuples and rows, on a device; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Rows):
        return Rows(**{field.name: moved(getattr(value, field.name), device) for field in dataclasses.fields(Rows)})
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    return value


def checks(device: torch.device, *, tiny: bool = False) -> Iterator[Check]:
    """All of them, quick ones first. `tiny` leaves out large shapes, for a dry run."""
    ops, reference = TritonOps(device), ReferenceOps()
    sizes = [("odd", ODD, dtype, 7 if tiny else 70) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    if not tiny:
        sizes.append(("demo", DEMO, torch.bfloat16, 130))
    for label, dims, dtype, count in sizes:
        name = f"{label}, {dtype}".replace("torch.", "")
        yield Check(name=f"ops: {name}", run=lambda a=(dims, dtype, count): _row_ops(ops, reference, *a))
        yield Check(name=f"attention: {name}", run=lambda a=(dims, dtype): _attention(ops, reference, *a))
    yield Check(name="blocks and drafts", run=lambda: _blocks(device))
    yield Check(name="blocks that travel", run=lambda: _window(device))
    yield Check(name="the fp16 guard", run=lambda: _guard(ops, reference))
    yield Check(name="fp8", run=lambda: _fp8(device, 40 if tiny else 300))
    if not tiny:
        yield Check(name="ops: V3's widths, bfloat16", run=lambda: _row_ops(ops, reference, WIDE, torch.bfloat16, 150))
        yield Check(name="attention: V3's widths, bfloat16",
                    run=lambda: _attention(ops, reference, WIDE, torch.bfloat16, [2600, 1030, 70]))
        yield Check(name="rows: V3's widths, 700 at a time", run=lambda: _many_rows(ops))


class Findings:
    """What is wrong, of several things that are looked at: one of them hides no other."""

    def __init__(self) -> None:
        self._wrong: list[str] = []

    def look(self, what: str, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001  (recorded; what fails to compile hides no other either)
            traceback.print_exc()
            self._wrong.append(shortened(f"{what}: {type(error).__name__}: {error}", LOOK_CHARACTERS))

    def end(self) -> None:
        """Raises AssertionError with all of it."""
        assert not self._wrong, "; ".join(self._wrong)


def _row_ops(ops: TritonOps, reference: ReferenceOps, dims: Dims, dtype: torch.dtype, count: int) -> None:
    """Every op that has a kernel against the reference; rows alone and in threes against the same rows among all, bit
    for bit."""
    device_ops, rows, findings = OnDevice(ops), torch.arange(count), Findings()
    some_rows = (torch.tensor([count - 1]), torch.tensor([count // 2, 0, count - 1]))

    def look(op: str, case: RowOp) -> None:
        results = case(device_ops, rows)
        for result, expected in zip(results, case(reference, rows), strict=True):
            _compare(op, dtype, result, expected)
        for some in some_rows:
            for part, whole in zip(case(device_ops, some), results, strict=True):
                assert same_bits(part, whole[some]), f"rows {some.tolist()} have other bits than among {count}"

    for op, case in row_ops(dims, dtype, count, seed=count).items():
        findings.look(op, partial(look, op, case))
    findings.end()


def _compare(op: str, dtype: torch.dtype, result: Tensor, expected: Tensor) -> None:
    if op == "moe_gate" and result.dtype is torch.int32:
        differ = (result != expected).any(dim=1).float().mean().item()
        assert differ <= 0.02, f"moe_gate: {differ:.1%} of the rows chose other experts"
    elif op == "moe_gate":
        same = (result - expected).abs() <= 1e-4 * expected.abs().max()
        assert same.all(dim=1).float().mean() >= 0.98, "moe_gate: weights differ"
    elif result.dtype is torch.int32:
        assert torch.equal(result, expected), f"{op}: {(result != expected).sum().item()} of {result.numel()} differ"
    else:
        check_close(TABLE_NAMES.get(op, op), torch.float32 if op in ("head", "logprobs") else dtype, result, expected)


def _attention(ops: TritonOps, reference: ReferenceOps, dims: Dims, dtype: torch.dtype,
               lengths: list[int] | None = None) -> None:
    """Both forms against the reference; absorbed rows alone, as one of few and as a prompt's chunk, bit for bit; FP8
    latents like the bf16 numbers that they stand for."""
    data = PagedSequences(dims, dtype, lengths or [200, 65, 1], seed=3)
    run = PagedRun(data, reference, block_size=16, seed=2)
    everything = data.rows()
    kv = torch.stack([data.kv[row.sequence][row.position] for row in everything])
    run.ops.latent_write(kv, data.norm, 1e-6, data.rope, run.place(everything), run.cache)
    lengths = data.lengths
    rows = [
        Row(sequence=s, position=p) for s, n in enumerate(lengths) for p in sorted({0, n // 2, max(0, n - 2), n - 1})
    ]
    where, q = run.place(rows), torch.stack([data.q[row.sequence][row.position] for row in rows])
    device_ops, findings, check = OnDevice(ops), Findings(), (data.scale, 0)
    ours, theirs = device_ops.pack_absorbed(data.w_uk, data.w_uv), reference.pack_absorbed(data.w_uk, data.w_uv)
    queries = reference.mla_queries(q, theirs, data.rope, where.positions_T)

    @functools.cache
    def together() -> Tensor:
        return device_ops.mla_attention(queries, run.cache, where, *check, dims.C)

    def expanded() -> None:
        check_close(
            TABLE_NAMES["mla_attention_expanded"], dtype,
            device_ops.mla_attention_expanded(q, ours, data.rope, run.cache, where, *check),
            reference.mla_attention_expanded(q, theirs, data.rope, run.cache, where, *check))

    def absorbed() -> None:
        check_close(TABLE_NAMES["mla_attention"], dtype, together(),
                    reference.mla_attention(queries, run.cache, where, *check, dims.C))

    def alone() -> None:
        for t, row in enumerate(rows):
            one = device_ops.mla_attention(queries[t : t + 1], run.cache, run.place([row]), *check, dims.C)
            assert same_bits(one[0], together()[t]), f"{row} has other bits"

    def as_a_prompt() -> None:
        chunk = [Row(sequence=0, position=p) for p in range(max(0, lengths[0] - 40), lengths[0])]
        chunk_q = torch.stack([data.q[0][row.position] for row in chunk])
        chunk_queries = reference.mla_queries(chunk_q, theirs, data.rope, run.place(chunk).positions_T)
        prompt = device_ops.mla_attention(chunk_queries, run.cache, run.place(chunk), *check, dims.C)
        last = next(t for t, row in enumerate(rows) if row == chunk[-1])
        assert same_bits(prompt[-1], together()[last]), "a prompt's row has other bits than a decoded one"

    def fp8() -> None:
        slots = latent_fp8.encode(run.cache.view(-1, dims.E).float().nan_to_num(), dims.C)
        plain = latent_fp8.decode(slots, dims.C).view(run.cache.shape)
        packed = slots.view(*run.cache.shape[:2], -1)
        assert same_bits(device_ops.mla_attention(queries, packed, where, *check, dims.C),
                         device_ops.mla_attention(queries, plain, where, *check, dims.C)), "other bits than bf16's"

    for what, function in (("expanded", expanded), ("absorbed", absorbed), ("a row alone", alone),
                           ("a prompt", as_a_prompt)):
        findings.look(what, function)
    if dtype is torch.bfloat16 and dims.C % 128 == 0:
        findings.look("FP8 latents", fp8)
    findings.end()


def _guard(ops: TritonOps, reference: ReferenceOps) -> None:
    """The scaled sum before a norm, bit for bit, and its range."""
    generator = torch.Generator().manual_seed(4)
    x, residual = (torch.randn(9, 300, generator=generator).half() for _ in range(2))
    x[1], residual[1] = 60_000, 60_000
    scales = {"x_scale": 0.4, "residual_scale": 0.4}
    device_ops = OnDevice(ops)
    (normed, total), (want, want_total) = (
        each.add_rms_norm(x, residual, torch.ones(300), 1.6e-7, **scales) for each in (device_ops, reference))
    assert same_bits(total, want_total), "add_rms_norm: the scaled sum"
    check_close("add_rms_norm", torch.float16, normed, want)


def _many_rows(ops: TritonOps) -> None:
    """The large tiles at V3's widths: some of 700 rows against the same rows alone, on the device alone."""
    case = row_ops(dataclasses.replace(WIDE, X=8, num_groups=4, num_groups_kept=2, K=2), torch.bfloat16, 700, seed=1)
    device_ops, findings = OnDevice(ops), Findings()

    def look(op: str) -> None:
        whole, some = case[op](device_ops, torch.arange(700)), torch.tensor([0, 333, 699])
        for part, full in zip(case[op](device_ops, some), whole, strict=True):
            assert same_bits(part, full[some]), "rows have other bits among 700"

    for op in ("linear", "mla_queries", "absorb_values", "moe_gate", "moe_experts", "swiglu", "linear_fp8",
               "moe_experts_fp8", "swiglu_fp8"):
        findings.look(op, partial(look, op))
    findings.end()


def _fp8(device: torch.device, count: int) -> None:
    """Quantization bit for bit, products within the table, rows alone bit for bit."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 1100, generator=generator).bfloat16()
    for power_of_two in (False, True):
        for part, expected in zip(moved(fp8_quant(x.to(device), power_of_two), torch.device("cpu")),
                                  quant_reference.fp8_quant(x, power_of_two), strict=True):
            assert torch.equal(part.float(), expected.float()), "fp8_quant"
    for num_out in (130, 3000):
        values, scale = quant_reference.quantize_weight(torch.randn(num_out, 1100, generator=generator) / 33)
        weight = Fp8Weight(weight_MK=values.to(device), scale_mk=scale.to(device), power_of_two=False)
        result = fp8_linear(x.to(device), weight)
        on_cpu = Fp8Weight(weight_MK=values, scale_mk=scale, power_of_two=False)
        check_close("fp8_linear_on_matrix_units", torch.bfloat16, result.cpu(), reference_fp8_linear(x, on_cpu))
        assert same_bits(fp8_linear(x[-1:].to(device), weight).cpu(), result[-1:].cpu()), "fp8_linear: a row alone"
    gate_up, down = (_fp8_stack(generator, *shape) for shape in ((5, 256, 1100), (5, 1100, 128)))
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(count)]).int()
    weights = torch.rand(count, 2, generator=generator)
    packed = Experts(gate_up=_to(gate_up, device), down=_to(down, device), num_shared=1)
    result = moe_experts(x.to(device), weights.to(device), chosen.to(device), packed).cpu()
    for t in (0, count - 1):
        parts = [fp8_expert(x[t : t + 1], _one(gate_up, e), _one(down, e))[0] for e in [*chosen[t].tolist(), 4]]
        expected = parts[0] * weights[t, 0] + parts[1] * weights[t, 1] + parts[2]
        check_close("fp8_expert", torch.bfloat16, result[t], expected.bfloat16())
        alone = moe_experts(*(a[t : t + 1].to(device) for a in (x, weights, chosen)), packed).cpu()
        assert same_bits(alone[0], result[t]), "fp8 experts: a row alone"


def _fp8_stack(generator: torch.Generator, *shape: int) -> Fp8Weight:
    parts = [quant_reference.quantize_weight(torch.randn(shape[1:], generator=generator) / shape[2] ** 0.5)
             for _ in range(shape[0])]
    return Fp8Weight(weight_MK=torch.stack([values.view(torch.uint8) for values, _ in parts]).view(torch.float8_e4m3fn),
                     scale_mk=torch.stack([scale for _, scale in parts]), power_of_two=False)


def _one(weight: Fp8Weight, index: int) -> Fp8Weight:
    return Fp8Weight(weight_MK=weight.weight_MK[index], scale_mk=weight.scale_mk[index], power_of_two=False)


def _to(weight: Fp8Weight, device: torch.device) -> Fp8Weight:
    return Fp8Weight(weight_MK=weight.weight_MK.to(device), scale_mk=weight.scale_mk.to(device), power_of_two=False)


def _window(device: torch.device) -> None:
    """Blocks leave one arena of the device through its window in shared memory, and enter another one."""
    layout = CacheLayout(block_size=16, components=tuple(
        Component(name=dtype, kind=ComponentKind.PAGED, width=width, dtype=dtype)
        for dtype, width in (("bf16", 576), ("fp8", 656), ("fp32", 576))))
    source, target = DeviceArena(layout, 40, device), DeviceArena(layout, 40, device)
    ids = np.array([39, 0, 7], dtype=np.int64)
    for component, slots in enumerate(source.components):
        octets = slots.view(torch.uint8)
        octets.copy_(torch.randint(0, 256, octets.shape, dtype=torch.uint8, device=device))
        source.expose(component, ids, source.generations[ids])
        for block in ids.tolist():
            target.piece(component, block)[:] = source.piece(component, block)
        target.take_in(component, ids)
        arrived = target.components[component].view(torch.uint8)
        assert torch.equal(arrived[ids.tolist()], octets[ids.tolist()]), f"component {component} arrived otherwise"
        assert not arrived[1:7].any(), "other blocks were written"
    for arena in (source, target):
        arena.close()


def _blocks(device: torch.device) -> None:
    """Checksums, copies and the acceptance of drafts."""
    octets = np.random.default_rng(0).integers(0, 256, 80_000, dtype=np.uint8)
    memory, lengths = torch.from_numpy(octets).to(device), [0, 5, 656, 18_432, 1152]
    offsets = [0, 8, 16, 1024, 40_000]
    sums = piece_checksums(memory, torch.tensor(offsets).to(device), torch.tensor(lengths).to(device))
    expected = [checksum_reference.checksum(octets[o : o + n].tobytes()) for o, n in zip(offsets, lengths, strict=True)]
    assert sums.cpu().numpy().view(np.uint64).tolist() == expected, "block_checksum"
    target = torch.zeros_like(memory)
    lengths[1] = 8
    copy_pieces(memory, target, torch.tensor(offsets).to(device), torch.tensor(offsets).to(device),
                torch.tensor(lengths).to(device), max(lengths))
    for start, length in zip(offsets, lengths, strict=True):
        assert torch.equal(target[start : start + length], memory[start : start + length]), "block_copy"
    assert int((target != 0).sum()) <= sum(lengths), "block_copy wrote elsewhere"
    generator = torch.Generator().manual_seed(1)
    shapes = ((50, 4), (50, 3), (50,), (50,), (50, 2))
    tokens = [torch.randint(0, 3, shape, generator=generator).int() for shape in shapes]
    tokens[3] += 1
    assert torch.equal(verify_drafts(*moved(tuple(tokens), device)).cpu(), verify_reference.verify_drafts(*tokens))
