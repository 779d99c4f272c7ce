"""Weights by precision, with their scales, and what each rank of tensor parallelism holds of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Precision(Enum):
    """How a matrix is stored. `value`: bits a weight, bytes a scale, rows and columns that share one (0: no scales)."""

    FP4 = (4, 1, 1, 32)            # e2m1, one E8M0 scale for 32 weights of a row (deepseek_v4.md §2)
    FP8 = (8, 1, 128, 128)         # e4m3, E8M0 scales (deepseek_v4.md §2)
    FP8_FP32 = (8, 4, 128, 128)    # e4m3, FP32 scales (deepseek_v3.md §2)
    BF16 = (16, 0, 0, 0)
    FP32 = (32, 0, 0, 0)
    INT64 = (64, 0, 0, 0)

    @property
    def title(self) -> str:
        return "FP8" if self is Precision.FP8_FP32 else self.name

    @property
    def has_scales(self) -> bool:
        return self.value[1] > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """`count` tensors of one shape.

    Attributes:
        part: what it is counted under.
        shape: (outputs, inputs), or (width,); of FP4 the logical one, two weights a byte.
        split: tensor parallelism divides it over its ranks; otherwise each has all of it.
    """

    name: str
    part: str
    shape: tuple[int, ...]
    precision: Precision
    count: int = 1
    split: bool = False

    @property
    def num_elements(self) -> int:
        """Without scales."""
        return self.count * math.prod(self.shape)

    @property
    def weight_bytes(self) -> int:
        return self.num_elements * self.precision.value[0] // 8

    @property
    def scale_bytes(self) -> int:
        _, scale_bytes, rows, columns = self.precision.value
        if not self.precision.has_scales:
            return 0
        outputs, inputs = self.shape
        return self.count * scale_bytes * -(-outputs // rows) * -(-inputs // columns)

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.scale_bytes

    @property
    def num_tensors(self) -> int:
        return self.count * (2 if self.precision.has_scales else 1)

    @property
    def num_stored_elements(self) -> int:
        """As a file's header counts them: scales too, two FP4 weights as one."""
        stored = self.num_elements // 2 if self.precision is Precision.FP4 else self.num_elements
        return stored + (self.scale_bytes // self.precision.value[1] if self.precision.has_scales else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Sums over some weights."""

    weights: tuple[Weight, ...]

    def part(self, part: str) -> Ledger:
        return Ledger(weights=tuple(weight for weight in self.weights if weight.part == part))

    @property
    def parts(self) -> tuple[str, ...]:
        """In order of appearance."""
        return tuple(dict.fromkeys(weight.part for weight in self.weights))

    @property
    def num_elements(self) -> int:
        return sum(weight.num_elements for weight in self.weights)

    @property
    def num_stored_elements(self) -> int:
        return sum(weight.num_stored_elements for weight in self.weights)

    @property
    def num_tensors(self) -> int:
        return sum(weight.num_tensors for weight in self.weights)

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def scale_bytes(self) -> int:
        return sum(weight.scale_bytes for weight in self.weights)

    @property
    def split_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights if weight.split)

    @property
    def replicated_bytes(self) -> int:
        return self.num_bytes - self.split_bytes

    @property
    def by_precision(self) -> dict[str, int]:
        """Bytes with scales."""
        found: dict[str, int] = {}
        for weight in self.weights:
            found[weight.precision.title] = found.get(weight.precision.title, 0) + weight.num_bytes
        return found

    def rank_bytes(self, tp: int) -> int:
        """Of one rank; what does not divide evenly is rounded up."""
        return self.replicated_bytes + -(-self.split_bytes // tp)


def matrices(part: str, precision: Precision, named: Iterable[tuple[str, tuple[int, ...], int, bool]]) -> list[Weight]:
    """Of (name, shape, count, split)."""
    return [
        Weight(name=name, part=part, shape=shape, precision=precision, count=count, split=split)
        for name, shape, count, split in named if count
    ]
