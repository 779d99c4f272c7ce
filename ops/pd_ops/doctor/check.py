"""One finding about a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pd_ops.output import Document
from pd_ops.tables import table


class Result(Enum):
    OK = "ok"
    WARNING = "warning"  # it serves, but slower, or not as tested
    ABSENT = "absent"    # something that serving does not need is not here
    FAILED = "failed"    # serving needs it


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """`sentence` says what was found, and what to do about it if it is not good."""

    name: str
    result: Result
    sentence: str

    def to_json(self) -> Document:
        return {"name": self.name, "result": self.result.value, "sentence": self.sentence}


def can_serve(checks: Sequence[Check]) -> bool:
    return not any(check.result is Result.FAILED for check in checks)


def checks_text(checks: Sequence[Check]) -> str:
    rows = [(check.name, check.result.value, check.sentence) for check in checks]
    failed = [check.name for check in checks if check.result is Result.FAILED]
    verdict = f"this host cannot serve: {', '.join(failed)}" if failed else "this host can serve"
    return f"{table(('check', 'result', 'what was found'), rows)}\n{verdict}"
