"""One placement of a journey: the calls to its two workers, and what comes back from them.

Reserve (decode) -> Prefill (prefill) -> source known -> Pull (decode), beside it the first token
-> tokens from the decode worker's stream -> end

With local prefill: Reserve -> ComputePrompt (decode) -> all tokens from its stream -> end
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import DataLoss, Gone, PdRelayError, ResourceExhausted, Unavailable, from_code
from pd_router import wire
from pd_router.journey import HandoffReport, Journey, JourneyState, LocalPrefillReport
from pd_router.link import WorkerLink
from pd_router.reply_bounds import ReplyBounds
from pd_router.request import Request
from pd_router.stream import Chunk
from pd_router.timeline import AttemptTimes


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt ended without an end of the journey, and the worker it is laid to.

    Attributes:
        no_room: that is all that was wrong there.
        lease_s: of the lease that a decode worker has granted, which the next attempt may take over; 0: none has.
    """

    error: PdRelayError
    culprit: WorkerLink
    no_room: bool
    lease_s: float


class Attempt:
    """A passenger of its links while it runs.

    Args:
        prefill: the decode worker itself, if that is to compute the prompt.
        decode: None if prefill samples the only token that is left.
        speculate: draft tokens a step.
        block_hashes: of the prompt's full blocks, in order; none if cached blocks are not to be used.
        prefix_holder: whose cached blocks the worker that computes the prompt may take; None: nobody's.
        num_uncached_tokens: that are counted as waiting where the prompt is computed until they are.
        num_decode_blocks: that are counted as taken at the decode worker until it reports.
        emit: called with every chunk, in order.
        remaining_ms: of the request's time.
        handoff_wait_s: how long the decode worker may still finish a handoff whose prefill call has broken.
        itl_target_ms: between two tokens; placement lets nobody in who would break it. None: there is no target.
        times: of this attempt, to be filled in.
        bounds: of what its workers may say.
    """

    def __init__(
        self,
        request: Request,
        journey: Journey,
        *,
        prefill: WorkerLink,
        decode: WorkerLink | None,
        speculate: int,
        block_hashes: Sequence[bytes],
        prefix_holder: pb.PrefixHolder | None,
        num_uncached_tokens: int,
        num_decode_blocks: int,
        emit: Callable[[Chunk], None],
        remaining_ms: Callable[[], int],
        handoff_wait_s: float,
        times: AttemptTimes,
        bounds: ReplyBounds,
        itl_target_ms: float | None = None,
    ) -> None:
        self.number = journey.place(with_decode=decode is not None)
        self.itl_limit_ms = math.inf if itl_target_ms is None else itl_target_ms
        self._request = request
        self._journey = journey
        self._prefill = prefill
        self._decode = decode
        self._speculate = speculate
        self._block_hashes = block_hashes
        self._prefix_holder = prefix_holder
        self._num_uncached_tokens = num_uncached_tokens
        self._num_decode_blocks = num_decode_blocks
        self._emit = emit
        self._remaining_ms = remaining_ms
        self._handoff_wait_s = handoff_wait_s
        self._times = times
        self._bounds = bounds
        self._token_ids = [*request.prompt_ids, *journey.stream.token_ids]
        self._granted: set[WorkerLink] = set()  # where there is something to renew
        self._lease_s = 0.0  # of the decode worker's
        self._proven: set[WorkerLink] = set()  # links that have brought a token
        self._assigned_at = 0
        self._prefilled = False
        self._over: asyncio.Future[AttemptFailure | None] = asyncio.get_running_loop().create_future()
        self._ref = wire.journey_ref(journey.journey_id, self.number)

    async def run(self) -> AttemptFailure | None:
        """Until the journey has ended or the attempt has failed; the journey knows of either."""
        links = list(dict.fromkeys(link for link in (self._prefill, self._decode) if link is not None))
        for link in links:
            link.attach(self._journey.journey_id, self)
        self._assigned_at = self._prefill.assign_tokens(self._num_uncached_tokens)
        if self._decode is not None:
            self._decode.assign_blocks(self._num_decode_blocks)
        calls = asyncio.create_task(self._calls())
        try:
            return await self._over
        finally:
            for link in links:
                link.detach(self._journey.journey_id)
            self._note_prefilled()
            calls.cancel()
            await asyncio.gather(calls, return_exceptions=True)

    # As a passenger

    def on_event(self, link: WorkerLink, event: pb.TokensEvent) -> None:
        if link is not self._decode or event.journey.attempt != self.number:
            return
        has_reports = event.HasField("handoff") or event.HasField("local_prefill")
        if has_reports or event.drafted_tokens or event.accepted_tokens:
            try:
                self._bounds.check_event(event)
            except DataLoss as error:
                self._fail(error, link, retryable=True)
                return
            self._note_reports(link, event)
        if token_ids := event.token_ids:
            self._take(link, event.index, token_ids, event.logprobs)
        if event.HasField("failure"):
            self._take_failure(link, event.failure)
        elif event.finish_reason:
            self._fail(Gone(), link, retryable=True)  # ignored if its last token was seen to end the journey

    def on_lost(self, link: WorkerLink, error: PdRelayError) -> None:
        if link is self._decode:
            self._fail(error, link, retryable=True)
        else:
            self._prefill_broke(error, retryable=True)

    def on_gone(self, link: WorkerLink, ref: pb.JourneyRef) -> None:
        if ref.attempt == self.number:
            self.on_lost(link, Gone())

    def renewable(self, link: WorkerLink) -> pb.JourneyRef | None:
        wanted = link in self._granted and (link is self._decode or self._journey.state is not JourneyState.DECODING)
        return self._ref if wanted else None

    # Calls

    async def _calls(self) -> None:
        try:
            lease = None
            if self._decode is not None:
                lease = await self._reserve(self._decode)
                if not self._journey.reserved(self.number):
                    return
                self._times.reserved_s = _now_s()
            if self._decode is self._prefill and lease is not None:
                await self._compute_prompt(self._decode, lease)
            else:
                await self._run_prefill(lease)
        except Exception as error:  # noqa: BLE001 - whoever waits for the attempt is told
            if not self._over.done():
                self._over.set_exception(error)

    async def _reserve(self, decode: WorkerLink) -> pb.ReserveReply | None:
        try:
            lease = await decode.calls.reserve(self._reserve_request(decode))
            self._bounds.check_lease(lease)
        except PdRelayError as error:
            self._refused(error, decode)
            return None
        self._granted.add(decode)
        self._lease_s = lease.lease_ms / 1000
        return lease

    async def _compute_prompt(self, decode: WorkerLink, lease: pb.ReserveReply) -> None:
        request = pb.ComputePromptRequest(
            journey=self._ref, lease_id=lease.lease_id, prefix_holder=self._prefix_holder
        )
        try:
            await decode.calls.compute_prompt(request)
        except PdRelayError as error:
            self._fail(error, decode, retryable=error.retryable)

    async def _run_prefill(self, lease: pb.ReserveReply | None) -> None:
        pull: asyncio.Task[None] | None = None
        try:
            async for reply in self._prefill.calls.prefill(self._prefill_request(lease)):
                if reply.HasField("source"):
                    self._bounds.check_source(reply.source, self._prefill.epoch)
                if reply.HasField("source") and lease is not None and self._journey.source_known(self.number):
                    self._granted.add(self._prefill)
                    self._times.source_s = _now_s()
                    pull = asyncio.create_task(self._pull(lease, reply.source))
                elif reply.HasField("first_token"):
                    self._bounds.check_first_token(reply.first_token)
                    self._take_first(reply.first_token)
                    break
            else:
                raise Unavailable(f"worker {self._prefill.worker_id} ended Prefill without a first token")
            if pull is not None:
                await pull
        except ResourceExhausted as error:
            self._refused(error, self._prefill)
        except PdRelayError as error:
            self._prefill_broke(error, retryable=error.retryable)
            if pull is not None:
                await pull
        finally:
            if pull is not None:
                pull.cancel()

    async def _pull(self, lease: pb.ReserveReply, source: pb.SourceInfo) -> None:
        assert self._decode is not None
        request = pb.PullRequest(journey=self._ref, lease_id=lease.lease_id, source=source)
        try:
            await self._decode.calls.pull(request)
        except PdRelayError as error:
            self._fail(error, self._decode, retryable=error.retryable)

    # What comes back

    def _note_reports(self, link: WorkerLink, event: pb.TokensEvent) -> None:
        self._journey.note_drafts(self.number, num_accepted=event.accepted_tokens, num_drafted=event.drafted_tokens)
        if event.HasField("handoff"):
            self._note_handoff(link, event.handoff)
        if event.HasField("local_prefill"):
            self._note_local_prefill(link, event.local_prefill)

    def _take_first(self, first: pb.FirstToken) -> None:
        self._times.prefilled_s, self._times.prompt = _now_s(), first.times
        self._note_prefilled()
        self._journey.note_cached_tokens(self.number, first.cached_tokens)
        logprobs = [first.logprobs] if first.HasField("logprobs") else []
        self._take(self._prefill, first.index, [first.token_id], logprobs)
        if self._decode is None:
            self._fail(Gone(), self._prefill, retryable=True)  # ignored unless that token did not end it

    def _take(self, link: WorkerLink, index: int, token_ids: Sequence[int], logprobs: Sequence[pb.Logprobs]) -> None:
        try:
            self._bounds.check_tokens(token_ids, logprobs)
            chunk = self._journey.take_tokens(self.number, index, wire.sampled_tokens(token_ids, logprobs))
        except DataLoss as error:
            self._fail(error, link, retryable=True)
            return
        if link not in self._proven:
            self._proven.add(link)
            link.note_success(self._journey.journey_id)
        if chunk is not None:
            self._emit(chunk)
        if self._journey.ended and not self._over.done():
            self._over.set_result(None)

    def _note_handoff(self, link: WorkerLink, handoff: pb.HandoffDone) -> None:
        self._journey.note_cached_tokens(self.number, handoff.cached_tokens)
        report = HandoffReport(
            prefill_worker=self._prefill.worker_id,
            decode_worker=link.worker_id,
            num_bytes=handoff.bytes,
            num_hidden_bytes=handoff.hidden_bytes,
            pull_s=handoff.pull_ms / 1000,
            exposed_s=handoff.exposed_ms / 1000,
            transport=handoff.transport,
            block_checksums=tuple(handoff.block_checksums),
        )
        self._journey.note_handoff(self.number, report)
        self._times.handed_over_s, self._times.handoff = _now_s(), handoff

    def _note_local_prefill(self, link: WorkerLink, done: pb.LocalPrefillDone) -> None:
        self._times.prefilled_s, self._times.prompt = _now_s(), done.times
        self._note_prefilled()
        self._journey.note_cached_tokens(self.number, done.cached_tokens)
        report = LocalPrefillReport(worker=link.worker_id, block_checksums=tuple(done.block_checksums))
        self._journey.note_local_prefill(self.number, report)

    def _note_prefilled(self) -> None:
        """The prompt waits no more where it is computed."""
        if not self._prefilled:
            self._prefilled = True
            self._prefill.note_computed(self._num_uncached_tokens, self._assigned_at)

    # Failures

    def _take_failure(self, link: WorkerLink, failure: pb.Failure) -> None:
        error = from_code(failure.code, failure.message)
        if isinstance(error, ResourceExhausted):
            self._refused(error, link)  # it was given up for want of room
        else:
            culprit = self._prefill if failure.missing_blocks else link
            self._fail(error, culprit, retryable=failure.retryable)

    def _refused(self, error: PdRelayError, link: WorkerLink) -> None:
        """A worker did not take it. One without room is not tried again before it next reports."""
        no_room = isinstance(error, ResourceExhausted)
        if no_room:
            link.note_no_room()
        self._fail(error, link, retryable=error.retryable, no_room=no_room)

    def _prefill_broke(self, error: PdRelayError, *, retryable: bool) -> None:
        """The call or the worker is gone. What it has published may be all that the decode worker needs, unless it has
        said what cannot be."""
        if self._journey.state is JourneyState.DECODING:
            return
        if retryable and self._journey.state is JourneyState.PULLING and not isinstance(error, DataLoss):
            asyncio.get_running_loop().call_later(self._handoff_wait_s, self._handoff_overdue, error)
        else:
            self._fail(error, self._prefill, retryable=retryable)

    def _handoff_overdue(self, error: PdRelayError) -> None:
        if self._journey.state is JourneyState.PULLING:
            self._fail(error, self._prefill, retryable=True)

    def _fail(self, error: PdRelayError, culprit: WorkerLink, *, retryable: bool, no_room: bool = False) -> None:
        if self._over.done() or self._journey.ended:
            return
        if not no_room:
            culprit.note_failure(self._journey.journey_id, error)
        self._journey.fail_attempt(self.number, error, retryable=retryable, counts=not no_room)
        self._times.failure, self._times.failed_s = f"{error.code.value} at {culprit.worker_id}", _now_s()
        self._over.set_result(AttemptFailure(error, culprit, no_room, self._lease_s))

    # Requests

    def _reserve_request(self, decode: WorkerLink) -> pb.ReserveRequest:
        request = self._request
        return pb.ReserveRequest(
            journey=self._ref,
            router_id=decode.router_id,
            block_hashes=self._block_hashes,
            num_prompt_tokens=len(request.prompt_ids),
            token_ids=self._token_ids,
            num_emitted_tokens=len(self._token_ids) - len(request.prompt_ids),
            sampling=self._sampling(),
            deadline_ms=self._remaining_ms(),
            bypass_prefix_cache=request.placement.bypass_prefix_cache,
            report_block_checksums=request.placement.report_block_checksums,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )

    def _prefill_request(self, lease: pb.ReserveReply | None) -> pb.PrefillRequest:
        request = self._request
        return pb.PrefillRequest(
            journey=self._ref,
            router_id=self._prefill.router_id,
            token_ids=self._token_ids,
            num_prompt_tokens=len(request.prompt_ids),
            sampling=self._sampling(),
            lease_id=lease.lease_id if lease is not None else "",
            lease_ms=lease.lease_ms if lease is not None else 0,
            num_held_blocks=lease.num_held_blocks if lease is not None else 0,
            deadline_ms=self._remaining_ms(),
            bypass_prefix_cache=request.placement.bypass_prefix_cache,
            no_handoff=lease is None,
            cache_salt=request.cache_salt,
            priority=request.priority,
            prefix_holder=self._prefix_holder,
        )

    def _sampling(self) -> pb.Sampling:
        return wire.sampling_message(
            self._request.params, ending_ids=self._request.ending_ids, speculate=self._speculate
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
