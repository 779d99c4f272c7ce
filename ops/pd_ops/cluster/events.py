"""What becomes of a cluster's processes, as `serve` tells it: to people in a sentence, to programs as a document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class EventKind(Enum):
    LOST = "lost"              # a process has ended that should not have
    RESTARTED = "restarted"    # it serves again, in a new life
    START_FAILED = "start_failed"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterEvent:
    kind: EventKind
    actor_id: str
    sentence: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"event": self.kind.value, "id": self.actor_id, **self.details}
