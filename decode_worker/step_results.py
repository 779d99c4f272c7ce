"""What the compute thread has done, taken in: tokens for routers, blocks that are final, ends, and blocks for the steps
to come."""

from __future__ import annotations

import logging

from decode_worker.blocks import ChoiceBlocks
from decode_worker.choice_book import ChoiceBook
from decode_worker.choice_state import HANDED_OVER, ChoiceState
from decode_worker.endings import ChoiceEnds
from decode_worker.local_choices import LocalChoices
from decode_worker.local_prefill import LocalFirst
from decode_worker.room import RoomKeeper
from decode_worker.runner import Progress, StepReport
from decode_worker.tokens_hub import TokensHub
from pd_engine.errors import ResourceExhausted
from pd_engine.service.rates import Rate

log = logging.getLogger(__name__)


class StepResults:
    """Belongs to the event loop's thread. `ends` and `local` are given after construction, as they call `supply`."""

    ends: ChoiceEnds
    local: LocalChoices

    def __init__(self, book: ChoiceBook, *, blocks: ChoiceBlocks, room: RoomKeeper, hub: TokensHub) -> None:
        self._book = book
        self._blocks = blocks
        self._room = room
        self._hub = hub
        self._num_running = 0
        self._tokens_per_sequence_s = Rate()

    @property
    def num_running(self) -> int:
        """In the batch of the last step."""
        return self._num_running if self._book.begun else 0

    @property
    def itl_ms(self) -> float:
        """Between two tokens of one sequence, at the present batch; 0: not yet measured."""
        rate = self._tokens_per_sequence_s.value
        return 1000 / rate if rate else 0.0

    def on_step(self, report: StepReport) -> None:
        """A step is done."""
        self._num_running = report.num_running
        if report.progress:
            mean_tokens = sum(len(item.tokens) for item in report.progress) / len(report.progress)
            self._tokens_per_sequence_s.add(mean_tokens, report.seconds + report.prompts.seconds)
        self.local.on_step(report.prompts, report.seconds, self._book.begun)
        for stored in report.moved_out:
            self._room.on_moved_out(self._book.begun.get(stored.sequence.name), stored)
        for name in report.moved_back:
            self._room.on_moved_back(self._book.begun.get(name))
        for item in report.progress:
            self._advance(item)
        for first in report.prompts.firsts:
            self._begin_to_decode(first)
        for name, error in [*report.failed.items(), *report.prompts.failed.items()]:
            if (record := self._book.begun.get(name)) is not None:
                record.in_compute = False
                self.ends.fail(record, error)
                self.ends.settle(record)
        self.supply()

    def supply(self) -> None:
        """Finds sequences their next blocks; who is to be given up for others is placed again by its router."""
        while given_up := self._room.supply(
            sorted(self._book.begun.values(), key=lambda record: record.place),
            sorted(self._book.open(), key=lambda record: record.place),
        ):
            for record in given_up:
                log.warning("%s is given up for want of room", record.name)
                error = ResourceExhausted("this decode worker has no room left, not even in host memory")
                self.ends.fail(record, error)

    def _advance(self, item: Progress) -> None:
        record = self._book.begun.get(item.name)
        if record is None:
            return
        if record.state in HANDED_OVER:
            self._blocks.grew(record, [token.token_id for token in item.tokens], item.num_final_mtp)
            self._hub.push(record.spec.key, item.tokens, accepted=item.accepted, drafted=item.drafted)
        if item.finish_reason:
            record.in_compute = False
            if record.state in HANDED_OVER:
                self.ends.finish(record, item.finish_reason, item.stop_reason)
            self.ends.settle(record)

    def _begin_to_decode(self, first: LocalFirst) -> None:
        record = self._book.begun.get(first.sequence.name)
        if record is None or record.state is not ChoiceState.PREFILLING:
            return
        self.local.first_token(record, first)
        if first.finish_reason:
            self.ends.finish(record, first.finish_reason, first.stop_reason)
            self.ends.settle(record)
