"""How choices end: the router is told once, the lease is released, and blocks are given back when the compute thread
has let go of them."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.blocks import ChoiceBlocks
from decode_worker.choice_book import ChoiceBook
from decode_worker.choice_state import LEASED, ChoiceRecord, ChoiceState
from decode_worker.room import RoomKeeper
from decode_worker.runner import DecodeRunner
from decode_worker.tokens_hub import TokensHub
from kv_transfer.destination import HandoffDestination
from kv_transfer.journey import Clock
from kv_transfer.prefix_fetch import PrefixFetcher
from pd_engine.errors import PdRelayError
from pd_engine.service.wire import failure_message


class ChoiceEnds:
    """Belongs to the event loop's thread.

    Args:
        post: runs a command in the compute thread between two steps.
        report: runs a callback in the event loop, from the compute thread.
        on_room: blocks have come free without a step.

    `destination` and `fetcher` are given after construction.
    """

    destination: HandoffDestination
    fetcher: PrefixFetcher[ChoiceRecord]

    def __init__(
        self, book: ChoiceBook, *, blocks: ChoiceBlocks, room: RoomKeeper, hub: TokensHub, runner: DecodeRunner,
        post: Callable[[Callable[[], None]], None], report: Callable[..., None], clock: Clock,
        on_room: Callable[[], None],
    ) -> None:
        self._book = book
        self._blocks = blocks
        self._room = room
        self._hub = hub
        self._runner = runner
        self._post = post
        self._report = report
        self._clock = clock
        self._on_room = on_room

    def finish(self, record: ChoiceRecord, finish_reason: str, stop_reason: str) -> None:
        self._hub.finish(record.spec.key, finish_reason, stop_reason, self._clock())
        record.told_end = True
        self.end(record)

    def fail(self, record: ChoiceRecord, error: PdRelayError) -> None:
        self.tell_failure(record, error, (), retryable=error.retryable)
        self.end(record)

    def tell_failure(
        self, record: ChoiceRecord, error: PdRelayError, missing_blocks: tuple[int, ...], *, retryable: bool
    ) -> None:
        if not record.told_end:
            record.told_end = True
            self._hub.fail(record.spec.key, failure_message(error, missing_blocks, retryable), self._clock())

    def end(self, record: ChoiceRecord) -> None:
        """Ends a choice at once; its blocks follow when the compute thread has let go of them."""
        if record.state is ChoiceState.ENDED:
            return
        was_leased = record.state in LEASED
        if record.state is ChoiceState.FETCHING:
            self.fetcher.stop(record)
        record.move(ChoiceState.ENDED)
        self.forget(record)
        key = record.spec.key
        if was_leased:
            self.destination.release(key.journey_id, key.attempt)
        if record.in_compute:
            self._post(lambda: self._drop(record.name))
        self.settle(record)

    def taken_over(self, record: ChoiceRecord) -> None:
        """The lease of a next attempt has its blocks."""
        record.move(ChoiceState.ENDED)
        self.forget(record)

    def forget(self, record: ChoiceRecord) -> None:
        self._book.end(record, self._clock())
        if not record.told_end:
            self._hub.forget_up_to(record.spec.key.journey_id, record.spec.key.attempt)

    def settle(self, record: ChoiceRecord) -> None:
        """Gives the blocks of an ended choice back, unless the compute thread may still write to them."""
        if record.state is not ChoiceState.ENDED or record.in_compute:
            return
        self._book.gave_back(record)
        self._room.on_ended(record)
        if record.block_ids:
            self._blocks.release(record)

    def _drop(self, name: str) -> None:
        """In the compute thread."""
        self._report(self._dropped, name, self._runner.drop(name))

    def _dropped(self, name: str, num_final_mtp: int | None) -> None:
        if (record := self._book.begun.get(name)) is not None:
            record.in_compute = False
            if num_final_mtp is not None:
                self._blocks.caught_up(record, num_final_mtp)
            self.settle(record)
            self._on_room()
