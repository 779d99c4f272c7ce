"""A decode worker's state, all of it in the event loop's thread: leases, pulls, sequences, their ends.

A choice's blocks belong to the handoff's destination until the handoff is complete, and to the choice from then on.
They are freed when it has ended *and* the compute thread has let go of them. `room` finds a sequence more of them as it
grows. The core takes calls of routers and news of handoffs; `steps` takes in what is computed, `ends` ends choices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from decode_worker.blocks import ChoiceBlocks
from decode_worker.choice_book import ChoiceBook
from decode_worker.choice_state import BEGUN, HANDED_OVER, LEASED, ChoiceRecord, ChoiceState, ReserveSpec
from decode_worker.endings import ChoiceEnds
from decode_worker.handoff_state import check_tokens, handed_over, handoff_message, is_worth_another_try
from decode_worker.local_choices import LocalChoices
from decode_worker.reservation import num_blocks_granted
from decode_worker.room import RoomKeeper
from decode_worker.runner import DecodeRunner
from decode_worker.silence import RouterWatch
from decode_worker.step_results import StepResults
from decode_worker.tokens_hub import TokensHub
from kv_transfer.destination import HandoffDestination
from kv_transfer.journey import Clock, JourneyKey, PrefixSource, SourceInfo
from kv_transfer.lease import Lease, PullResult
from kv_transfer.prefix_fetch import PrefixFetcher
from pd_engine.cache.chain import Chain
from pd_engine.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Gone,
    PdRelayError,
    Unavailable,
)
from pd_engine.sequence import SampledToken

log = logging.getLogger(__name__)


class DecodeCore:
    """Args:
    post: runs a command in the compute thread between two steps.
    report: runs a callback in the event loop, from the compute thread.
    projected_tokens: generated ones that a lease covers at most; 0: all.
    silence_s: how long a choice goes on without a word of its router.

    `connect` completes it.
    """

    destination: HandoffDestination

    def __init__(
        self, *, blocks: ChoiceBlocks, room: RoomKeeper, block_size: int, projected_tokens: int,
        silence_s: float, hub: TokensHub, runner: DecodeRunner, post: Callable[[Callable[[], None]], None],
        report: Callable[..., None], clock: Clock,
    ) -> None:
        self._blocks = blocks
        self.room = room
        self._projected_tokens = projected_tokens
        self._routers = RouterWatch(silence_s)
        self._hub = hub
        self._runner = runner
        self._post = post
        self._clock = clock
        self._book = ChoiceBook()
        self.steps = StepResults(self._book, blocks=blocks, room=room, hub=hub)
        self.ends = self.steps.ends = ChoiceEnds(
            self._book, blocks=blocks, room=room, hub=hub, runner=runner, post=post, report=report, clock=clock,
            on_room=self.steps.supply,
        )
        self.local = self.steps.local = LocalChoices(
            blocks=blocks, block_size=block_size, room=room, hub=hub, runner=runner, post=post, fail=self.ends.fail,
            check_room=lambda record: self._num_blocks_granted(record.spec, None, record.chain), clock=clock,
        )
        self._books_checked = False
        self.draining = False

    def connect(self, destination: HandoffDestination, fetcher: PrefixFetcher[ChoiceRecord]) -> None:
        """Before anything is asked; after construction, as both report here."""
        self.destination = self.ends.destination = destination
        self.local.fetcher = self.ends.fetcher = fetcher

    # What routers ask for

    def reserve(self, spec: ReserveSpec) -> Lease:
        """Raises:
        Gone: released up to this attempt, or a higher attempt was seen, or it has ended.
        AlreadyExists: the same attempt with another payload.
        InvalidArgument: it can never fit.
        ResourceExhausted: too few free blocks; with a retry hint.
        Unavailable: the worker is draining.
        """
        key = spec.key
        known = self._book.newest(key.journey_id)
        if self._book.is_gone(key):
            raise Gone()
        if known is not None and known.spec.key == key:
            known.check_repeated(spec)
            return self._lease(spec, known.num_blocks, known.chain)
        if self.draining and known is None:
            raise Unavailable("this decode worker is draining")
        chain = self._blocks.chain(spec)
        num_blocks = self._num_blocks_granted(spec, known, chain)
        if known is not None and known.state not in LEASED:
            self.ends.end(known)
        try:
            lease = self._lease(spec, num_blocks, chain)  # takes the lease of an earlier attempt over
        except PdRelayError:
            if known is not None:
                self.ends.end(known)  # the earlier lease has not survived that
            raise
        if known is not None and known.state in LEASED:
            self.ends.taken_over(known)
        now_s = self._clock()
        record = ChoiceRecord(
            spec=spec, num_blocks=num_blocks, lease_block_ids=lease.block_ids, chain=chain, heard_s=now_s,
            deadline_s=now_s + spec.deadline_ms / 1000 if spec.deadline_ms else None,
            num_generated=spec.choice.num_emitted_tokens,
        )
        self.room.arrive(record, now_s)
        self._book.add(record)
        self._hub.open(key, spec.router_id, spec.choice.num_emitted_tokens)
        self._books_checked = False
        return lease

    def pull(self, key: JourneyKey, lease_id: str, source: SourceInfo) -> None:
        """Raises:
        Gone: there is no such lease.
        """
        record = self._book.find(key)
        if record is None:
            raise Gone()
        record.heard_s = self._clock()
        if record.state in BEGUN or record.state is ChoiceState.STALLED:
            return  # the same call again, late
        self.destination.pull(key, lease_id, source)
        if record.state is ChoiceState.RESERVED:
            record.move(ChoiceState.PULLING)

    def compute_prompt(self, key: JourneyKey, lease_id: str, holder: PrefixSource | None = None) -> None:
        """In place of a pull: the prompt is computed here, and all tokens are told from the first one on.

        Args:
            holder: who may have more of its beginning cached than is here.

        Raises:
            Gone: there is no such lease.
            FailedPrecondition: it is being pulled.
        """
        record = self._book.find(key)
        if record is None:
            raise Gone()
        record.heard_s = self._clock()
        if record.state in (ChoiceState.PULLING, ChoiceState.STALLED):
            raise FailedPrecondition(f"the handoff of {record.name} has begun: reserve again to compute it here")
        if record.state in BEGUN:
            return  # the same call again, late
        lease = self.destination.keep(key, lease_id)
        self._book.begin(record)
        self.local.begin(record, lease, holder, self._clock())

    def release(self, journey_id: str, up_to_attempt: int) -> None:
        """Ends everything of the journey up to that attempt; nothing more is told of it."""
        self._book.bury(journey_id, up_to_attempt, self._clock())
        record = self._book.newest(journey_id)
        if record is not None and record.spec.key.attempt <= up_to_attempt:
            self.ends.end(record)
        self.destination.release(journey_id, up_to_attempt)
        self._hub.forget_up_to(journey_id, up_to_attempt)

    def renew(self, key: JourneyKey) -> str:
        """queued (not decoding yet), running (until its router has had time to read the end) or gone."""
        record = self._book.find(key)
        if record is None:
            return "running" if self._hub.knows(key) else "gone"
        record.heard_s = self._clock()
        if record.state in BEGUN:
            return "running" if record.state in HANDED_OVER else "queued"
        return "queued" if self.destination.renew(key) else "gone"

    def router_left(self, router_id: str) -> None:
        """Its token stream has ended; its choices go on for `silence_s`."""
        self._routers.left(router_id, self._clock())

    def tick(self, now_s: float) -> None:
        """Ends what is past its deadline or has lost its router, and checks the books when idle."""
        self._book.tick(now_s)
        self._hub.tick(now_s)
        for record in self._book.open():
            if record.deadline_s is not None and now_s >= record.deadline_s:
                self.ends.fail(record, DeadlineExceeded("the request's deadline has passed"))
            elif self._is_deserted(record, now_s):
                log.warning("%s: nothing heard of router %s", record.name, record.spec.router_id)
                self.ends.fail(record, Cancelled("the router was not heard of"))
        self._routers.keep({record.spec.router_id for record in self._book.open()})
        self.steps.supply()
        if self.is_idle and not self._books_checked:
            self._blocks.check_integrity()
            self._books_checked = True

    def fail_all(self, error: PdRelayError) -> None:
        """Nothing will be decoded any more."""
        for record in self._book.open():
            self.ends.fail(record, error)

    # What the worker reports

    @property
    def num_waiting(self) -> int:
        """Sequences that are not in the batch: not yet, or not now."""
        return max(0, len(self._book.begun) - self.steps.num_running)

    @property
    def is_idle(self) -> bool:
        """No lease, no sequence, no block in use."""
        return self._book.is_empty

    # What the handoff's destination reports

    def on_pulled(self, key: JourneyKey, result: PullResult) -> None:
        """A handoff is complete; its blocks are ours from here."""
        record = self._book.find(key)
        assert record is not None and record.state is ChoiceState.PULLING, (key, record)
        record.move(ChoiceState.DECODING)
        num_mtp_tokens = self._blocks.handed_over(record, result.block_ids) if result.block_ids else 0
        closing, first_token_id = result.closing, result.closing.first_token_id
        assert first_token_id is not None, f"{key}: a prefix is no prompt"
        self._hub.set_handoff(key, handoff_message(result, record.spec.report_block_checksums))
        try:
            check_tokens(closing, self._runner.engine.config.vocab_size)
        except DataLoss as error:  # nothing that it sent is to be trusted
            all_blocks = tuple(range(result.checksums.shape[1]))
            self.ends.tell_failure(record, error, all_blocks, retryable=error.retryable)
            self.ends.end(record)
            return
        try:
            if closing.finish_reason is None:
                sequence = handed_over(
                    self._runner.engine, record.name, record.spec.choice, closing, list(record.block_ids),
                    num_mtp_tokens=num_mtp_tokens,
                )
        except PdRelayError as error:
            self.ends.fail(record, error)
            return
        self._blocks.grew(record, [first_token_id], num_mtp_tokens)
        self._hub.push(key, [SampledToken(token_id=first_token_id, logprobs=closing.logprobs)])
        if closing.finish_reason is not None:
            self.ends.finish(record, closing.finish_reason.value, closing.stop_reason)
            return
        record.in_compute = True
        self._book.begin(record)
        place = self.room.arrive(record, self._clock())
        self._post(lambda: self._runner.add(sequence, place))
        self.steps.supply()

    def on_pull_failed(self, key: JourneyKey, error: PdRelayError, missing_blocks: tuple[int, ...]) -> None:
        """A handoff has failed. Its lease waits for the router's next attempt, unless it has expired as well."""
        record = self._book.find(key)
        if record is None:
            return
        assert record.state is ChoiceState.PULLING, record
        self.ends.tell_failure(record, error, missing_blocks, retryable=is_worth_another_try(error))
        if self.destination.renew(key):
            record.move(ChoiceState.STALLED)
        else:
            self.ends.end(record)

    def on_lease_expired(self, key: JourneyKey) -> None:
        """Nobody renewed it."""
        record = self._book.find(key)
        if record is not None:
            self.ends.tell_failure(record, DeadlineExceeded("the lease has expired"), (), retryable=True)
            self.ends.end(record)

    # Small questions

    def _num_blocks_granted(self, spec: ReserveSpec, known: ChoiceRecord | None, chain: Chain | None) -> int:
        """Raises:
        InvalidArgument, ResourceExhausted: as `reserve`.
        """
        room = self.room.room_for(
            spec, known, chain, list(self._book.begun.values()), projected_tokens=self._projected_tokens,
            itl_ms=self.steps.itl_ms,
        )
        return num_blocks_granted(spec.choice, room)

    def _lease(self, spec: ReserveSpec, num_blocks: int, chain: Chain | None) -> Lease:
        return self.destination.reserve(
            spec.key, num_tokens=len(spec.choice.token_ids), num_blocks=num_blocks,
            held_block_ids=self._blocks.cached(spec, chain),
        )

    def _is_deserted(self, record: ChoiceRecord, now_s: float) -> bool:
        router_id = record.spec.router_id
        return self._routers.is_silent(
            router_id, is_listening=self._hub.is_listening(router_id), heard_s=record.heard_s, now_s=now_s
        )
