"""Which workers run an attempt: a pure function of the request and a snapshot of both pools.

The least loaded worker that has room: prefill by prompt tokens that wait there, decode by its sequences. Every
decision can be shown with all candidates and their costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """One worker at one moment.

    Attributes:
        ready: takes new work.
        expected: is there, or may come back; False once it is known that it will not.
        has_room: False after it refused for lack of room, until it next reports.
        num_queued_tokens: prompt tokens that wait or run there.
        num_sequences: that it decodes or will.
        num_blocks_free: for a prefill worker all it has, as prompts wait there for theirs.
    """

    worker_id: str
    ready: bool
    expected: bool = True
    has_room: bool = True
    num_queued_tokens: int = 0
    num_sequences: int = 0
    num_blocks_free: int = 0
    num_blocks_total: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRequest:
    """What is to be placed.

    Attributes:
        num_tokens: to prefill: prompt and emitted.
        num_prefill_blocks, num_decode_blocks: that it needs there at most; none at decode if it is never handed over.
        pinned_prefill, pinned_decode: the only worker allowed; empty: any.
        avoided: workers that failed this journey; taken only if nobody else is there.
        preferred_decode: holds verified blocks of this journey; empty: none.
    """

    num_tokens: int
    num_prefill_blocks: int
    num_decode_blocks: int
    pinned_prefill: str = ""
    pinned_decode: str = ""
    avoided: frozenset[str] = frozenset()
    preferred_decode: str = ""


class Exclusion(Enum):
    """Why a candidate was not considered."""

    PINNED_ELSEWHERE = "the request names another worker"
    ENDED = "its process has ended"
    NOT_READY = "not ready"
    TOO_SMALL = "can never hold it"
    NO_ROOM = "no room now"
    AVOIDED = "failed this journey before"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as it was judged: its cost (tokens or sequences before this one), or why it is out."""

    worker: WorkerView
    cost: float
    exclusion: Exclusion | None = None

    def explain(self) -> str:
        verdict = self.exclusion.value if self.exclusion else f"cost {self.cost:g}"
        return f"{self.worker.worker_id}: {verdict}"


class RefusalKind(Enum):
    NONE_LEFT = "no worker is left"
    NO_WORKER = "no worker is ready"
    NO_ROOM = "no worker has room now"
    NEVER = "no worker can ever hold it"
    UNKNOWN = "there is no such worker"


@dataclass(frozen=True, slots=True)
class Refusal:
    role: str
    kind: RefusalKind
    candidates: tuple[Candidate, ...]

    def explain(self) -> str:
        return f"{self.role}: {self.kind.value} ({'; '.join(c.explain() for c in self.candidates) or 'none exists'})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """`decode_worker` is None if prefill samples the only token that is left."""

    prefill_worker: str
    decode_worker: str | None
    prefill_candidates: tuple[Candidate, ...]
    decode_candidates: tuple[Candidate, ...]

    def explain(self) -> str:
        """One line a pool: who was chosen, and what everybody would have cost."""
        return "\n".join(
            f"{role} {chosen or 'none'}: {'; '.join(c.explain() for c in candidates)}"
            for role, chosen, candidates in (
                ("prefill", self.prefill_worker, self.prefill_candidates),
                ("decode", self.decode_worker, self.decode_candidates),
            )
        )


def place(request: PlacementRequest, snapshot: Snapshot) -> Placement | Refusal:
    """The pair for one attempt, or why there is none."""
    decode: tuple[Candidate, ...] = ()
    decode_choice: str | None = None
    if request.num_decode_blocks:
        decode = _judge(
            snapshot.decode,
            request.pinned_decode,
            request.avoided,
            request.num_decode_blocks,
            lambda worker: worker.num_sequences - (worker.worker_id == request.preferred_decode) * 1e9,
        )
        best = _best(decode)
        if best is None:
            return Refusal("decode", _refusal_kind(decode), decode)
        decode_choice = best.worker.worker_id
    prefill = _judge(
        snapshot.prefill,
        request.pinned_prefill,
        request.avoided,
        request.num_prefill_blocks,
        lambda worker: worker.num_queued_tokens,
    )
    best = _best(prefill)
    if best is None:
        return Refusal("prefill", _refusal_kind(prefill), prefill)
    return Placement(
        prefill_worker=best.worker.worker_id,
        decode_worker=decode_choice,
        prefill_candidates=prefill,
        decode_candidates=decode,
    )


def _judge(
    workers: tuple[WorkerView, ...],
    pinned: str,
    avoided: frozenset[str],
    num_blocks: int,
    cost: Callable[[WorkerView], float],
) -> tuple[Candidate, ...]:
    judged = [Candidate(worker, cost(worker), _exclusion(worker, pinned, num_blocks)) for worker in workers]
    usable = [c for c in judged if c.exclusion is None]
    if any(c.worker.worker_id not in avoided for c in usable):
        judged = [
            Candidate(c.worker, c.cost, Exclusion.AVOIDED)
            if c.exclusion is None and c.worker.worker_id in avoided
            else c
            for c in judged
        ]
    return tuple(judged)


def _exclusion(worker: WorkerView, pinned: str, num_blocks: int) -> Exclusion | None:
    if pinned and worker.worker_id != pinned:
        return Exclusion.PINNED_ELSEWHERE
    if not worker.expected:
        return Exclusion.ENDED
    if not worker.ready:
        return Exclusion.NOT_READY
    if num_blocks > worker.num_blocks_total:
        return Exclusion.TOO_SMALL
    if not worker.has_room or num_blocks > worker.num_blocks_free:
        return Exclusion.NO_ROOM
    return None


def _best(candidates: tuple[Candidate, ...]) -> Candidate | None:
    usable = [c for c in candidates if c.exclusion is None]
    return min(usable, key=lambda c: (c.cost, -c.worker.num_blocks_free, c.worker.worker_id), default=None)


def _refusal_kind(candidates: tuple[Candidate, ...]) -> RefusalKind:
    reasons = {c.exclusion for c in candidates}
    if reasons <= {Exclusion.ENDED, Exclusion.PINNED_ELSEWHERE} and reasons != {Exclusion.PINNED_ELSEWHERE}:
        return RefusalKind.NONE_LEFT
    if Exclusion.NO_ROOM in reasons:
        return RefusalKind.NO_ROOM
    if Exclusion.NOT_READY not in reasons and Exclusion.TOO_SMALL in reasons:
        return RefusalKind.NEVER
    if reasons == {Exclusion.PINNED_ELSEWHERE}:
        return RefusalKind.UNKNOWN
    return RefusalKind.NO_WORKER
