"""What is known of one worker's load: its last report, what this router has sent there since, and its speeds."""

from __future__ import annotations

from collections.abc import Sequence

from pd_engine.contracts import worker_pb2 as pb
from pd_router.itl_line import ItlLine


class WorkerLoad:
    """Reports come a few times a second, placements more often: what was sent since the last report is added to it,
    so that one look at an idle worker does not send everybody there.

    Attributes:
        report: the last one of this life; None before the first.
        has_room: False after the worker refused for lack of room, until its next report, and while sequences wait for
            blocks there.
        has_refused: the former.
        num_assigned_tokens: to compute there for this router, and not known to be done.
        prefill_ms_per_token, move_ms_per_byte: measured; None: not yet.
        itl: time between two tokens by the batch, as far as it has been measured.
        experts, memory: as last told; not every report has them.
    """

    def __init__(self) -> None:
        self.report: pb.LoadsReply | None = None
        self.has_room = True
        self.has_refused = False
        self.num_assigned_tokens = 0
        self.prefill_ms_per_token: float | None = None
        self.move_ms_per_byte: float | None = None
        self.itl = ItlLine()
        self.experts: Sequence[pb.ExpertTokens] = ()
        self.memory: pb.MemoryAudit | None = None
        self._num_reports = 0
        self._num_new_tokens = 0  # assigned since the report
        self._num_done_tokens = 0  # assigned before it, and done since
        self._num_new_blocks = 0
        self._new_journeys: set[str] = set()

    def note_report(self, report: pb.LoadsReply) -> None:
        """Speeds of an idle worker are those of its last work."""
        self.report = report
        if report.experts:
            self.experts = report.experts
        if report.HasField("memory"):
            self.memory = report.memory
        self.has_room, self.has_refused = not report.num_preempted, False
        self._num_reports += 1
        self._num_new_tokens = self._num_done_tokens = self._num_new_blocks = 0
        self._new_journeys.clear()
        if report.prefill_tokens_per_s > 0:
            self.prefill_ms_per_token = 1000 / report.prefill_tokens_per_s
        if report.pull_bytes_per_s > 0:
            self.move_ms_per_byte = 1000 / report.pull_bytes_per_s
        if report.itl_ms > 0 and report.num_running:
            self.itl.note(report.num_running, report.itl_ms)

    def note_no_room(self) -> None:
        """It has refused for lack of room."""
        self.has_room, self.has_refused = False, True

    def note_lost(self) -> None:
        """This life is over, as far as this router knows."""
        self.report = None
        self.experts, self.memory = (), None

    def assign_tokens(self, num_tokens: int) -> int:
        """A prompt will be computed there. Returns what `note_computed` wants to know."""
        self.num_assigned_tokens += num_tokens
        self._num_new_tokens += num_tokens
        return self._num_reports

    def note_computed(self, num_tokens: int, assigned_at: int) -> None:
        """It has been, or will not be."""
        self.num_assigned_tokens -= num_tokens
        if assigned_at == self._num_reports:
            self._num_new_tokens -= num_tokens
        else:
            self._num_done_tokens += num_tokens

    def assign_blocks(self, num_blocks: int) -> None:
        """A lease will be asked for."""
        self._num_new_blocks += num_blocks

    def note_arrival(self, journey_id: str) -> None:
        self._new_journeys.add(journey_id)

    def note_departure(self, journey_id: str) -> None:
        self._new_journeys.discard(journey_id)

    @property
    def num_queued_tokens(self) -> int:
        """To compute before a prompt that came now: as reported and changed since, or as this router knows better."""
        reported = self.report.queued_prefill_tokens if self.report is not None else 0
        return max(reported + self._num_new_tokens - self._num_done_tokens, self.num_assigned_tokens)

    @property
    def num_sequences(self) -> int:
        """In the batch or on their way into it, everybody's."""
        report = self.report if self.report is not None else pb.LoadsReply()
        return report.num_running + report.num_waiting + report.num_leases + len(self._new_journeys)

    @property
    def num_blocks_free(self) -> int:
        reported = self.report.num_blocks_free if self.report is not None else 0
        return max(0, reported - self._num_new_blocks)
