"""What `bench transfer` moves: one region in one piece, and scattered pieces of a latent cache's size. Pure.

Both sides of a transfer, and the bare copy that it is compared with, compute the same places from the same case.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

import numpy as np

from kv_transfer.transport import Spans
from pd_engine.cache.arena import component_offsets
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_ops.bench.measured_process import Document
from pd_ops.bench.moving_sizes import NUM_PIECES, REGION_BYTES

GIB = 2**30
PIECE_SLOTS, PIECE_WIDTH = 16, 576  # 18 KiB in bf16: one layer's part of a block of DeepSeek-V3
REGION_WIDTH = 32_768               # 64 KiB a slot


class Shape(Enum):
    REGION = "region"
    PIECES = "pieces"


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingCase:
    """`num_pieces` of a region is 1. Pieces lie among as many others, in another order on either side."""

    shape: Shape
    layout: CacheLayout
    num_blocks: int
    num_pieces: int

    @property
    def piece_bytes(self) -> int:
        return self.layout.piece_bytes(0)

    @property
    def num_bytes(self) -> int:
        return self.num_pieces * self.piece_bytes

    def spans(self) -> Spans:
        """The same for every caller."""
        if self.shape is Shape.REGION:
            source = own = np.zeros(1, dtype=np.int64)
        else:
            random = np.random.default_rng(0)
            source = random.permutation(self.num_blocks)[: self.num_pieces].astype(np.int64)
            own = random.permutation(self.num_blocks)[: self.num_pieces].astype(np.int64)
        start = component_offsets(self.layout, self.num_blocks)[0][0]
        return Spans(
            block_ids=source, source_offsets=start + source * self.piece_bytes, offsets=start + own * self.piece_bytes,
            lengths=np.full(self.num_pieces, self.piece_bytes, dtype=np.int64),
        )


def moving_cases(region_bytes: int = REGION_BYTES, num_pieces: int = NUM_PIECES) -> list[MovingCase]:
    """Args: region_bytes: a multiple of 64 KiB."""
    slots = region_bytes // (2 * REGION_WIDTH)
    region = MovingCase(shape=Shape.REGION, layout=_layout(slots, REGION_WIDTH), num_blocks=1, num_pieces=1)
    pieces = MovingCase(
        shape=Shape.PIECES, layout=_layout(PIECE_SLOTS, PIECE_WIDTH), num_blocks=2 * num_pieces, num_pieces=num_pieces
    )
    return [region, pieces]


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingRow:
    """One transport in one case: the best round of each side, and their ratio.

    Attributes:
        checksums: whether the puller checked every piece, as it does in service.
        reference_gib_per_s: of the C library's memcpy of the same pieces in this process; for tcp, of a bare socket
            that moves them.
    """

    transport: str
    case: str
    checksums: bool
    gib_per_s: float
    reference_gib_per_s: float
    ratio: float

    def to_json(self) -> Document:
        return asdict(self)


def moving_row(
    transport: str, case: MovingCase, *, checksums: bool, seconds: list[float], reference_seconds: list[float]
) -> MovingRow:
    """From the seconds of every round."""
    rate, reference = (case.num_bytes / GIB / min(each) for each in (seconds, reference_seconds))
    return MovingRow(
        transport=transport, case=case.shape.value, checksums=checksums, gib_per_s=rate,
        reference_gib_per_s=reference, ratio=rate / reference,
    )


def _layout(block_size: int, width: int) -> CacheLayout:
    return CacheLayout(
        block_size=block_size,
        components=(Component(name="layers.0", kind=ComponentKind.PAGED, width=width, dtype="bf16"),),
    )
