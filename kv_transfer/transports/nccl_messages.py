"""How the ranges of a fetch are cut into messages: all bytes one after another, STAGING_BYTES at a time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kv_transfer.transport import Int64s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Message:
    """A part of the ranges, as parallel arrays.

    Attributes:
        arena_offsets: of each (part of a) range in an arena.
        offsets: of the same in the message.
    """

    arena_offsets: Int64s
    offsets: Int64s
    lengths: Int64s

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())


def messages_of(arena_offsets: Int64s, lengths: Int64s, message_bytes: int) -> list[Message]:
    """Both ends cut alike, as they know the same lengths."""
    ends = np.cumsum(lengths)
    starts, total = ends - lengths, int(ends[-1])
    messages = []
    for low in range(0, total, message_bytes):
        high = min(low + message_bytes, total)
        first, last = int(np.searchsorted(ends, low, side="right")), int(np.searchsorted(starts, high, side="left"))
        begin, end = np.maximum(starts[first:last], low), np.minimum(ends[first:last], high)
        messages.append(Message(
            arena_offsets=arena_offsets[first:last] + begin - starts[first:last], offsets=begin - low,
            lengths=end - begin,
        ))
    return messages
