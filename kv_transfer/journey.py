"""Who a handoff belongs to, and how its source is reached."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pd_engine.errors import InvalidArgument

Clock = Callable[[], float]
"""Monotonic seconds, such as `time.monotonic`; never wall-clock time."""

MAX_ATTEMPT = 1_000_000
_HEX_ID = re.compile(r"[0-9a-f]{32}\Z")


def is_hex_id(text: str) -> bool:
    """Whether `text` is 32 lower-case hexadecimal digits: the form of journey ids, epochs, lease ids and tokens."""
    return _HEX_ID.match(text) is not None


@dataclass(frozen=True, slots=True)
class JourneyKey:
    """One placement of one journey: every call about a handoff is idempotent by it.

    Attributes:
        journey_id: 32 lower-case hexadecimal digits.
        attempt: from 1, raised by the router with each placement.
    """

    journey_id: str
    attempt: int

    @property
    def owner(self) -> str:
        """The name under which a destination's blocks are held in its `BlockPool`, whatever the attempt."""
        return f"journey:{self.journey_id}"

    @staticmethod
    def parse(journey_id: str, attempt: int) -> JourneyKey:
        """A key from the wire.

        Raises:
            InvalidArgument: the id is not 32 hexadecimal digits, or the attempt is out of range.
        """
        if not is_hex_id(journey_id):
            raise InvalidArgument(f"journey id must be 32 hexadecimal digits, got {journey_id[:64]!r}")
        if not 1 <= attempt <= MAX_ATTEMPT:
            raise InvalidArgument(f"attempt must be 1 to {MAX_ATTEMPT}, got {attempt}")
        return JourneyKey(journey_id, attempt)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixSource:
    """A worker that is believed to have the beginning of a prompt cached.

    Attributes:
        address: of its gRPC service `KvSource`.
        epoch: the life of its process that this is known of.
        num_blocks: leading full blocks of the prompt.
    """

    address: str
    epoch: str
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    """What a puller needs to reach one handoff's source.

    Attributes:
        address: of the source's gRPC service `KvSource`.
        epoch: the life of the source's process that granted it.
        token: the capability for this handoff only.
    """

    address: str
    epoch: str
    token: str
