"""The corrections of Triton's interpreter are right, and needed: everything else that is tested here stands on them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support import triton_shim  # noqa: F401  (before triton)

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.runtime.errors import InterpreterError  # isort: skip


@triton.jit
def cast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * BLOCK + i[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def add_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x + x)


@triton.jit
def largest_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.max(tl.load(x_ptr + tl.arange(0, BLOCK)), 0))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty(x.shape, dtype=dtype)
    block = math.gcd(x.numel(), 2**16)
    cast_kernel[(x.numel() // block,)](x, result, BLOCK=block)
    return result


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def all_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def hard_float32() -> Tensor:
    """Random bits, and every bf16 with the bits below it just under, at and just above the middle."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (2**14,), generator=generator).to(torch.int32).view(torch.float32)
    middles = [(bits(all_bfloat16()).int() << 16) + low for low in (0x7FFF, 0x8000, 0x8001)]
    return torch.cat([random, *(middle.view(torch.float32) for middle in middles)])


def test_bf16_widens_exactly() -> None:
    x = all_bfloat16()
    assert torch.equal(bits(cast(x, torch.float32)), bits(x.float()))


def test_float32_rounds_to_the_nearest_even_bf16() -> None:
    x = hard_float32()
    got, want = cast(x, torch.bfloat16), x.bfloat16()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits(got)[~want.isnan()], bits(want)[~want.isnan()])


def test_float32_rounds_to_the_nearest_e4m3_and_saturates() -> None:
    x = torch.cat([hard_float32(), torch.linspace(-500, 500, 2**14), torch.linspace(-0.02, 0.02, 2**14)])
    got, want = cast(x, torch.float8_e4m3fn), x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(got.float().isnan(), x.isnan())
    assert torch.equal(bits(got)[~x.isnan()], bits(want)[~x.isnan()])


def test_e4m3_widens_exactly() -> None:
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(bits(cast(x, torch.float32)), bits(x.float()))


def test_float32_rounds_to_the_nearest_fp16_and_fp16_widens_exactly() -> None:
    """Beyond its range to infinity, below it to its subnormal numbers."""
    x = torch.cat([hard_float32(), torch.linspace(-1e-6, 1e-6, 2**14), torch.linspace(65_400, 65_700, 2**14)])
    got, want = cast(x, torch.float16), x.half()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits(got)[~want.isnan()], bits(want)[~want.isnan()])
    finite = want[want.isfinite()][: 2**14]
    assert torch.equal(cast(finite, torch.float32), finite.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_dot_is_the_product_of_the_numbers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    c = torch.full((32, 32), float("nan"))
    dot_kernel[(1,)](a, b, c, BLOCK=32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)


def test_a_row_of_dot_does_not_depend_on_its_place() -> None:
    generator = torch.Generator().manual_seed(2)
    row, b = torch.randn(64, generator=generator), torch.randn(64, 64, generator=generator)
    c = torch.empty(64, 64)
    dot_kernel[(1,)](row.expand(64, 64).contiguous(), b, c, BLOCK=64)
    assert torch.equal(c, c[:1].expand(64, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_arithmetic_in_narrow_formats_is_refused(dtype: torch.dtype) -> None:
    """Without the refusal it is silently computed on the integers that hold the bits, or, in fp16, narrowly."""
    x = torch.ones(16).to(dtype)
    with pytest.raises(InterpreterError, match="widen to float32 first"):
        add_kernel[(1,)](x, torch.empty_like(x), BLOCK=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_maximum_is_right(dtype: torch.dtype) -> None:
    """Triton widens the operands of its reductions by itself."""
    x = torch.randn(16, generator=torch.Generator().manual_seed(4)).to(dtype)
    top = torch.empty(1)
    largest_kernel[(1,)](x, top, BLOCK=16)
    assert top.item() == x.float().max().item()


def test_float32_arithmetic_is_untouched() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(3))
    y, top = torch.empty_like(x), torch.empty(1)
    add_kernel[(1,)](x, y, BLOCK=16)
    largest_kernel[(1,)](x, top, BLOCK=16)
    assert torch.equal(y, x + x)
    assert top.item() == x.max().item()
