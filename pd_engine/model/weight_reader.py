"""Tensors of a checked checkpoint, read into memory of their own: plain ones, and matrices in FP8 with their scales."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd_engine.errors import FailedPrecondition
from pd_engine.model.checkpoint import FP8_DTYPE, StoredTensor
from pd_engine.model.tensors import scale_name
from pd_kernels.fp8_matrix import BLOCK, Fp8Matrix, Weight, problem


class WeightReader:
    """Reads single tensors of a checked checkpoint into memory of their own. A context manager."""

    def __init__(self, stored: dict[str, StoredTensor]) -> None:
        self._stored = stored
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def read_into(self, target: Tensor, name: str) -> None:
        """Copies a tensor into `target`, rounding to its dtype.

        Raises:
            FailedPrecondition: the file has changed or is broken, or a number is not finite, or beyond the target's
                range.
        """
        mapped = self._mapped(name)
        target.copy_(mapped)
        _check_held(target, mapped, name)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        mapped = self._mapped(name)
        target = torch.empty(mapped.shape, dtype=dtype)
        target.copy_(mapped)
        _check_held(target, mapped, name)
        return target

    def matrices(self, names: list[list[str]], dtype: torch.dtype) -> Weight:
        """For each list the matrices of these names on top of each other, [X, ΣM, K]: read straight into the result,
        rounded to `dtype`; or as they are, where they are FP8.

        Raises:
            FailedPrecondition: see `read_into`; or FP8 numbers or scales are not usable.
        """
        shapes = [self.shape(name) for name in names[0]]
        size = (len(names), sum(rows for rows, _ in shapes), shapes[0][1])
        is_fp8 = self._stored[names[0][0]].dtype == FP8_DTYPE
        values = torch.empty(size, dtype=torch.float8_e4m3fn if is_fp8 else dtype)
        scales = torch.empty(*size[:2], -(-size[2] // BLOCK) if is_fp8 else 0)
        for index, stacked in enumerate(names):
            start = 0
            for name, (rows, _) in zip(stacked, shapes, strict=True):
                if is_fp8:
                    self._read_fp8(name, values[index, start : start + rows], scales[index, start : start + rows])
                else:
                    self.read_into(values[index, start : start + rows], name)
                start += rows
        return Fp8Matrix(codes_MK=values, scales_Mg=scales) if is_fp8 else values

    def matrix(self, names: list[str], dtype: torch.dtype) -> Weight:
        """`matrices` of one list: [ΣM, K]."""
        result = self.matrices([names], dtype)
        if isinstance(result, Fp8Matrix):
            return Fp8Matrix(codes_MK=result.codes_MK[0], scales_Mg=result.scales_Mg[0])
        return result[0]

    def _read_fp8(self, name: str, codes: Tensor, scales: Tensor) -> None:
        scale = self.read(scale_name(name), torch.float32)
        codes.copy_(self._mapped(name))
        wrong = problem(codes, scale)
        if wrong:
            raise FailedPrecondition(f"{name}: {wrong}")
        scales.copy_(Fp8Matrix.from_blocks(codes, scale).scales_Mg)

    def equal(self, name: str, other: str) -> bool:
        """Raises:
        FailedPrecondition: they differ, and one of them holds NaN or infinity.
        """
        if torch.equal(self._mapped(name), self._mapped(other)):
            return True
        for each in (other, name):
            _check_finite(self._mapped(each), each)
        return False

    def _mapped(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file: for copying from, never kept."""
        file = self._stored[name].file
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            tensor: Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise FailedPrecondition(f"{file} cannot be read: {error}") from None
        return tensor


def _check_held(target: Tensor, source: Tensor, name: str) -> None:
    """Raises:
    FailedPrecondition: `source` holds NaN or infinity, or a number beyond the range of `target`, which is its copy.
    """
    _check_finite(source if target.dtype == torch.float16 else target, name)
    if target.dtype == torch.float16 and not torch.isfinite(target.sum(dtype=torch.float32)):
        most = source.abs().max().item()
        raise FailedPrecondition(
            f"{name} holds numbers up to {most:g}, and fp16 none beyond {torch.finfo(torch.float16).max:g}; "
            "engine.dtype must be bf16 or fp32"
        )


def _check_finite(tensor: Tensor, name: str) -> None:
    """A sum is finite only if all numbers are, and costs a tenth of looking at each of them.

    Raises:
        FailedPrecondition: the tensor holds NaN or infinity.
    """
    if torch.isfinite(tensor.sum(dtype=torch.float32)):
        return
    wrong = torch.nonzero(~torch.isfinite(tensor))
    if len(wrong):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise FailedPrecondition(
            f"{name} holds NaN or infinity, read as {dtype}: {len(wrong)} of {tensor.numel()} numbers, the first at "
            f"{wrong[0].tolist()}; all weights must be finite"
        )
