"""Choices whose prompts this worker computes itself, as its event loop sees them: from the lease to the first token.

The beginning of a prompt that another worker has cached may be fetched first; whatever comes of that, the rest is
computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decode_worker.blocks import ChoiceBlocks
from decode_worker.choice_state import PROMPTS, ChoiceRecord, ChoiceState
from decode_worker.local_prefill import LocalFirst, PromptReport
from decode_worker.room import RoomKeeper
from decode_worker.runner import DecodeRunner
from decode_worker.tokens_hub import TokensHub
from kv_transfer.journey import Clock, PrefixSource
from kv_transfer.lease import Lease
from kv_transfer.prefix_fetch import PrefixFetcher
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import PdRelayError, ResourceExhausted
from pd_engine.priority import Turn
from pd_engine.sequence import Sequence
from pd_engine.service.prompt_times import PromptTimes
from pd_engine.service.rates import Rate
from pd_engine.steps.state import take_cached


class LocalChoices:
    """Belongs to the event loop's thread.

    Args:
        post: runs a command in the compute thread between two steps.
        fail: ends a choice.
        check_room: raises ResourceExhausted where a choice would be given no lease now.

    `fetcher` is given after construction, as it reports to `fetched`.

    Attributes:
        tokens_per_s: of prompts, while there are any: the decode steps beside them take their time too.
    """

    fetcher: PrefixFetcher[ChoiceRecord]

    def __init__(
        self, *, blocks: ChoiceBlocks, block_size: int, room: RoomKeeper, hub: TokensHub, runner: DecodeRunner,
        post: Callable[[Callable[[], None]], None], fail: Callable[[ChoiceRecord, PdRelayError], None],
        check_room: Callable[[ChoiceRecord], object], clock: Clock,
    ) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._room = room
        self._hub = hub
        self._runner = runner
        self._post = post
        self._fail = fail
        self._check_room = check_room
        self._clock = clock
        self._prompts: list[ChoiceRecord] = []  # and some that were
        self.tokens_per_s = Rate()

    def begin(self, record: ChoiceRecord, lease: Lease, holder: PrefixSource | None, now_s: float) -> None:
        """Its lease is kept: the compute thread has its prompt from here, or when what `holder` has is fetched."""
        record.begun_s = now_s
        record.prompt_times = PromptTimes(arrived_s=now_s)
        self._blocks.kept(record, lease.block_ids, lease.num_held_blocks)
        self._prompts.append(record)
        self._room.arrive(record, now_s)
        wish = self._blocks.wish(record, holder)
        if wish is not None and self.fetcher.start(record, wish):
            record.move(ChoiceState.FETCHING)
            record.prompt_times.fetching_s = now_s
        else:
            self._compute(record)

    def fetched(self, record: ChoiceRecord) -> None:
        """Its fetch has ended. If it failed, its blocks are not its own any more: it gets some if it would get a lease
        now, so not while others wait to come back. Else its router is to place it anew, as if there is no room."""
        try:
            if not record.block_ids:
                self._check_room(record)
                self._blocks.take_again(record)
        except ResourceExhausted as error:
            self._fail(record, error)
        else:
            self._compute(record)

    def _compute(self, record: ChoiceRecord) -> None:
        record.move(ChoiceState.PREFILLING)
        sequence = self._sequence(record)
        record.num_computed = sequence.num_computed
        record.in_compute = True
        assert record.prompt_times is not None, record.name
        record.prompt_times.running_s = self._clock()
        turn = Turn(priority=record.spec.priority, arrived_s=record.begun_s, deadline_s=record.deadline_s)
        with_checksums = record.spec.report_block_checksums
        self._post(lambda: self._runner.add_prompt(sequence, turn, with_checksums=with_checksums))

    def on_step(self, report: PromptReport, decode_seconds: float, records: Mapping[str, ChoiceRecord]) -> None:
        """What is computed is found from now on."""
        if report.was_busy:
            self.tokens_per_s.add(report.num_tokens, report.seconds + decode_seconds)
        for name, num_computed, num_final_mtp in report.progress:
            if (record := records.get(name)) is not None:
                if record.prompt_times is not None:
                    record.prompt_times.note_chunk(self._clock(), report.seconds, num_computed - record.num_computed)
                self._blocks.computed(record, num_computed, num_final_mtp)

    def first_token(self, record: ChoiceRecord, first: LocalFirst) -> None:
        """Its prompt is computed: it decodes, unless that token has ended it."""
        record.move(ChoiceState.DECODING)
        key, choice = record.spec.key, record.spec.choice
        num_cached = min(record.num_cached_blocks * self._block_size, choice.num_prompt_tokens)
        times = None if record.prompt_times is None else record.prompt_times.message(self._clock())
        self._hub.set_local_prefill(
            key, pb.LocalPrefillDone(cached_tokens=num_cached, block_checksums=first.checksums, times=times)
        )
        self._blocks.grew(record, [first.token.token_id], first.sequence.num_computed_mtp)
        self._hub.push(key, [first.token])
        if first.finish_reason:
            record.in_compute = False
        else:
            self._post(lambda: self._runner.add(first.sequence, record.place))

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed here."""
        self._prompts = [each for each in self._prompts if each.state in PROMPTS]
        return sum(len(each.spec.choice.token_ids) - each.num_computed for each in self._prompts)

    def _sequence(self, record: ChoiceRecord) -> Sequence:
        choice = record.spec.choice
        sequence = Sequence(
            name=record.name,
            token_ids=list(choice.token_ids),
            num_prompt_tokens=choice.num_prompt_tokens,
            params=choice.params,
            ending_ids=choice.ending_ids,
            speculate=choice.speculate if self._runner.engine.has_mtp else 0,
            block_ids=list(record.block_ids),
        )
        take_cached(
            sequence, num_cached=record.num_held_blocks * self._block_size,
            num_cached_mtp=record.num_held_mtp_blocks * self._block_size,
        )
        return sequence
