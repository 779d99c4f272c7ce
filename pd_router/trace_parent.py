"""The W3C's traceparent: by which a client says of which trace its request is a part. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """`is_sampled`: whether the client keeps its part, and so wants this one exported."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @staticmethod
    def parse(header: str | None) -> TraceParent | None:
        """None if there is none. One that is malformed counts as none: so the W3C wants it."""
        match = _FORM.fullmatch(header or "")
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return None
        return TraceParent(match[1], match[2], bool(int(match[3], 16) & _SAMPLED))
