"""What a verification run found, for programs and for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_ops.output import Document
from pd_ops.tables import table
from pd_ops.verification.cases import Case
from pd_ops.verification.outcome import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedCase:
    """`difference` is None where the cluster gave what one process gives."""

    case: Case
    expected: Outcome
    got: Outcome
    difference: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All cases of a run, and against what they were checked.

    Attributes:
        num_moves: times that a sequence has left for host memory while the room was pressed; None: it was not.
    """

    model: str
    fingerprint: str
    cluster: str
    bytes_per_token: int
    seconds: float
    num_moves: int | None
    checked: tuple[CheckedCase, ...]

    @property
    def different(self) -> list[CheckedCase]:
        return [one for one in self.checked if one.difference is not None]

    @property
    def num_identical(self) -> int:
        return len(self.checked) - len(self.different)

    def to_json(self) -> Document:
        return {
            "model": self.model, "fingerprint": self.fingerprint, "cluster": self.cluster,
            "count": len(self.checked), "identical": self.num_identical, "different": len(self.different),
            "handed_over": sum(one.got.handoff_bytes is not None for one in self.checked),
            "local": sum(one.got.is_local for one in self.checked),
            "handoff_bytes": sum(one.got.handoff_bytes or 0 for one in self.checked),
            "moves": self.num_moves,
            "cached_tokens": sum(one.got.num_cached_tokens for one in self.checked),
            "bytes_per_token": self.bytes_per_token, "seconds": round(self.seconds, 3),
            "cases": [_case_document(one) for one in self.checked],
        }

    def to_text(self) -> str:
        columns = ("mode", "cases", "prompt tokens", "tokens", "logprobs", "checksums", "cached", "bytes", "identical")
        modes = list(dict.fromkeys(one.case.mode for one in sorted(self.checked, key=lambda one: one.case.mode)))
        rows = [_row(mode, [one for one in self.checked if one.case.mode == mode]) for mode in modes]
        rows.append(_row("all", self.checked))
        lines = [
            table(columns, rows),
            f"prompts that decode workers computed: {sum(one.got.is_local for one in self.checked)}",
            f"sequences moved to host memory and back: {'not tried' if self.num_moves is None else self.num_moves}",
            f"identical to monolithic: {self.num_identical} of {len(self.checked)}",
        ]
        if self.different:
            first = self.different[0]
            lines.append(
                f"first difference: case {first.case.number} ({first.case.mode}, "
                f"{first.expected.num_prompt_tokens} prompt tokens): {first.difference}"
            )
        return "\n".join(lines)


def _row(mode: str, checked: Sequence[CheckedCase]) -> list[object]:
    return [
        mode, len(checked),
        sum(one.expected.num_prompt_tokens for one in checked),
        sum(len(one.expected.token_ids) for one in checked),
        sum(len(one.expected.logprobs) for one in checked),
        sum(len(one.expected.block_checksums) for one in checked if one.got.block_checksums),
        sum(one.got.num_cached_tokens for one in checked),
        sum(one.got.handoff_bytes or 0 for one in checked),
        f"{sum(one.difference is None for one in checked)} of {len(checked)}",
    ]


def _case_document(one: CheckedCase) -> Document:
    return {
        "number": one.case.number, "phase": one.case.phase.value, "follows": one.case.follows,
        "greedy": one.case.is_greedy, "speculation": one.case.speculates,
        "prompt_tokens": one.expected.num_prompt_tokens,
        "completion_tokens": len(one.expected.token_ids), "finish_reason": one.expected.finish_reason,
        "cached_tokens": one.got.num_cached_tokens, "handoff_bytes": one.got.handoff_bytes, "local": one.got.is_local,
        "identical": one.difference is None, "difference": one.difference,
    }
