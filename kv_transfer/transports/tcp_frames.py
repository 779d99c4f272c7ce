"""The frames of the tcp transport, little-endian, and the check of a request by the source.

    request     number u64, token 32 bytes, count u32, then count x (block u32, length u32, offset u64)
    reply       number u64, status u8; if the status is OK then
                count x generation u64, the ranges' bytes one after another, count x generation u64

The generations are read before the first byte of the reply is sent and after the last one has been taken over by the
kernel.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import Spans
from pd_engine.cache.arena import Arena
from pd_engine.errors import InvalidArgument

REQUEST = struct.Struct("<Q32sI")
REPLY = struct.Struct("<QB")
RANGE = np.dtype([("block", "<u4"), ("length", "<u4"), ("offset", "<u8")])
GENERATION = np.dtype("<u8")
MAX_RANGES = 65_536
MAX_REQUEST_BYTES = 256 * 1024 * 1024

Ranges = npt.NDArray[np.void]


class Status(IntEnum):
    OK = 0
    GONE = 1     # the token is not (any more) valid for these blocks
    INVALID = 2  # the request makes no sense; the source hangs up


def ranges_of(spans: Spans) -> Ranges:
    ranges = np.zeros(len(spans), dtype=RANGE)
    ranges["block"], ranges["length"], ranges["offset"] = spans.block_ids, spans.lengths, spans.source_offsets
    return ranges


def check_ranges(ranges: Ranges, arena: Arena) -> None:
    """Each range lies inside one piece of the block that it names.

    Raises:
        InvalidArgument: it does not.
    """
    block_N, length_N = ranges["block"].astype(np.int64), ranges["length"].astype(np.int64)
    if (ranges["offset"] >= np.uint64(arena.num_bytes)).any() or int(length_N.sum()) > MAX_REQUEST_BYTES:
        raise InvalidArgument("tcp: a range is outside the arena, or too much is asked for at once")
    offset_N = ranges["offset"].astype(np.int64)
    starts_C = np.array(arena.offsets, dtype=np.int64)
    piece_bytes_C = np.array([arena.layout.piece_bytes(c) for c in range(len(starts_C))], dtype=np.int64)
    component_N = np.searchsorted(starts_C, offset_N, side="right") - 1
    if (component_N < 0).any() or (length_N < 1).any() or (block_N >= arena.num_blocks).any():
        raise InvalidArgument("tcp: a range is empty, of no component, or of no block")
    inside_N = offset_N - starts_C[component_N] - block_N * piece_bytes_C[component_N]
    if (inside_N < 0).any() or (inside_N + length_N > piece_bytes_C[component_N]).any():
        raise InvalidArgument("tcp: a range is not inside its block's piece")
