"""A weight as FP8 checkpoints hold it: e4m3 numbers, and a float32 scale for each block of 128 × 128.

    W[m, k] = e4m3[m, k] · scale[m // 128, k // 128], rounded to float32     (`weight_scale_inv` is that scale)

Blocks at the lower and right edge may be smaller. A product x W^T takes x as it is, in the storage dtype: only weights
are quantized.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
MAX_SCALE = 128.0  # beyond it, and with NaN, the C++ ops would not give what the definition says
_MAGNITUDE = 0x7F  # all bits of an e4m3 number but its sign; all of them set are NaN


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Matrix:
    """`codes_MK`: float8_e4m3fn. `scales_Mg`: float32, one a row and 128 inputs; the rows of one block have equal ones,
    so that matrices can be stacked and cut at any row. Leading dims X of both stand for experts."""

    codes_MK: Tensor
    scales_Mg: Tensor

    @classmethod
    def from_blocks(cls, codes_MK: Tensor, scale_mk: Tensor) -> Fp8Matrix:
        """From one scale a block, as a checkpoint stores them."""
        rows, columns = codes_MK.shape[-2:]
        assert scale_mk.shape[-2:] == scale_shape(rows, columns), (codes_MK.shape, scale_mk.shape)
        scales_Mg = scale_mk.float().repeat_interleave(BLOCK, dim=-2)[..., :rows, :].contiguous()
        return cls(codes_MK=codes_MK, scales_Mg=scales_Mg)

    @property
    def shape(self) -> torch.Size:
        return self.codes_MK.shape

    def decode(self) -> Tensor:
        """W in float32."""
        wide = self.scales_Mg.repeat_interleave(BLOCK, dim=-1)[..., : self.shape[-1]]
        return self.codes_MK.float() * wide


Weight = Tensor | Fp8Matrix


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of `weight_scale_inv` for a weight [rows, columns]."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def decoded(weight: Weight) -> Tensor:
    """The numbers that a weight stands for: float32 of an FP8 one, else the tensor itself."""
    return weight.decode() if isinstance(weight, Fp8Matrix) else weight


def problem(codes: Tensor, scales: Tensor) -> str | None:
    """What makes e4m3 numbers or scales unusable, or None."""
    if not bool((scales.isfinite() & (scales >= 0) & (scales <= MAX_SCALE)).all()):
        return f"scales must be finite and within 0 to {MAX_SCALE:g}"
    if bool(((codes.view(torch.uint8) & _MAGNITUDE) == _MAGNITUDE).any()):
        return "NaN among the e4m3 numbers"
    return None
