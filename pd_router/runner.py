"""Runs one journey, attempt after attempt, and releases everything when it has ended, whatever happened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import DeadlineExceeded, Internal, PdRelayError
from pd_router.attempt import Attempt, AttemptFailure
from pd_router.choice_group import ChoiceGroup
from pd_router.costs import num_expected_tokens, num_uncached_tokens
from pd_router.explanation import explain
from pd_router.gate import RoomGate
from pd_router.journey import Journey
from pd_router.link import WorkerLink
from pd_router.link_state import LinkState, Role
from pd_router.placement import Placement
from pd_router.placement_reason import reason_of
from pd_router.pools import PlacementRequest
from pd_router.registry import Registry
from pd_router.reply_bounds import ReplyBounds
from pd_router.request import Request
from pd_router.stream import Chunk
from pd_router.targets import Targets
from pd_router.timeline import AttemptTimes, Timeline
from pd_router.waiting_line import Waiter
from pd_router.wanted import PromptHashes, placement_request

log = logging.getLogger(__name__)


class JourneyRunner:
    """Args:
    group: the choices of its request, which are let in or refused together.
    speculate: draft tokens a step.
    projected_tokens: generated ones that a decode worker grants blocks for at first, at most; 0: all.
    num_local_tokens, may_degrade: when decode workers may compute prompts, as of `PlacementRequest`.
    emit: called with every chunk, in order, from the event loop.
    timeout_s: of the whole journey.
    handoff_wait_s: how long a decode worker may still finish a handoff whose prefill call has broken.
    recovery_wait_s: how long a journey that has begun or failed waits for a worker that is expected back.
    ttft_target_ms, itl_target_ms: of requests that name none; what cannot keep them is refused while no prefill has
        begun. None: nothing is.
    timeline: of this choice, to be filled in.
    vocab_size: of the model; no worker names a token beyond it.
    """

    def __init__(
        self,
        request: Request,
        journey: Journey,
        *,
        registry: Registry,
        gate: RoomGate,
        group: ChoiceGroup,
        speculate: int,
        projected_tokens: int,
        num_local_tokens: int,
        may_degrade: bool,
        emit: Callable[[Chunk], None],
        timeout_s: float,
        handoff_wait_s: float,
        recovery_wait_s: float,
        ttft_target_ms: float | None,
        itl_target_ms: float | None,
        timeline: Timeline,
        vocab_size: int,
    ) -> None:
        self.journey = journey
        self._request = request
        self._hashes = PromptHashes(request)
        self._registry = registry
        self._gate = gate
        self._group = group
        self._speculate = speculate
        self._projected_tokens = projected_tokens
        self._num_local_tokens = num_local_tokens
        self._may_degrade = may_degrade
        self._emit = emit
        self._timeout_s = timeout_s
        self._handoff_wait_s = handoff_wait_s
        self._recovery_wait_s = recovery_wait_s
        self._ttft_target_ms = request.ttft_target_ms or ttft_target_ms
        self._itl_target_ms = request.itl_target_ms or itl_target_ms
        self._timeline = timeline
        self._vocab_size = vocab_size
        self._begun_s = 0.0
        self._is_let_in = False
        self._end_s = 0.0
        self._failures: dict[str, float] = {}  # when each worker that failed it last did, by the event loop's clock
        self._preferred_decode = ""
        self._num_own_blocks = 0  # of the last attempt's lease there
        self._lease_epoch, self._lease_end_s = "", 0.0  # the life of that worker, and until when it surely has it
        self._unreleased: dict[WorkerLink, int] = {}  # by link, the last attempt there

    async def run(self) -> None:
        """Returns when the journey has ended."""
        now_s = asyncio.get_running_loop().time()
        self._begun_s = now_s
        self._end_s = now_s + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self.journey.ended:
                    await self._attempt()
        except TimeoutError:
            self.journey.give_up(DeadlineExceeded(f"the request did not end within {self._timeout_s:g} s"))
        except asyncio.CancelledError:
            self.journey.cancel()
            raise
        except Exception as error:  # a bug in one journey must neither end the router nor leak
            log.exception("journey %s", self.journey.journey_id)
            self.journey.give_up(Internal(f"the router failed: {type(error).__name__}"))
        finally:
            assert self.journey.ended, self.journey.state
            self._release_all_but("")
            if self._is_let_in:
                self._gate.leave()

    async def _attempt(self) -> None:
        self._release_all_but(self._preferred_decode)
        wanted = partial(self._placement_request, await self._hashes.of(self._registry.identity))
        try:
            placement = await self._gate.place(
                wanted,
                self._waiter(wanted()),
                self._targets(),
                recovery_wait_s=self._recovery_wait_s,
                has_failed=self.journey.num_failures > 0,
            )
        except PdRelayError as error:
            self.journey.give_up(error)
            return
        self._is_let_in = True
        self._release_all_but(placement.decode_worker or "")  # what is not taken over
        if self._request.placement.report_placement:
            self.journey.placement = placement
        attempt, links = self._begin(placement)
        self._unreleased.update(dict.fromkeys(links, attempt.number))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("journey %s, attempt %d: %s", self.journey.journey_id, attempt.number, explain(placement))
        failure = await attempt.run()
        if failure is not None:
            self._learn(failure, attempt.number, placement)

    def _waiter(self, wanted: PlacementRequest) -> Waiter:
        return Waiter(
            tenant=self._request.tenant,
            priority=self._request.priority,
            num_tokens=wanted.num_tokens + num_expected_tokens(wanted),
            is_again=self._is_let_in,
            group=self._group,
        )

    def _targets(self) -> Targets | None:
        """None once it has begun: then it goes on, however late."""
        if self.journey.num_failures or self.journey.stream.has_begun:
            return None
        return Targets(begun_s=self._begun_s, ttft_ms=self._ttft_target_ms, itl_ms=self._itl_target_ms)

    def _begin(self, placement: Placement) -> tuple[Attempt, list[WorkerLink]]:
        wanted = placement.request
        prefill = self._registry.link(placement.prefill_worker)
        decode = None if placement.decode_worker is None else self._registry.link(placement.decode_worker)
        assert prefill is not None, placement.prefill_worker
        num_had = placement.snapshot.held.get(prefill.worker_id, 0)
        if placement.prefix is not None:
            num_had = placement.prefix.num_blocks
        num_blocks = wanted.num_local_blocks if prefill is decode else wanted.num_decode_blocks
        num_own = wanted.num_own_blocks if placement.decode_worker == wanted.preferred_decode else 0
        attempt = Attempt(
            self._request,
            self.journey,
            prefill=prefill,
            decode=decode,
            speculate=self._speculate,
            block_hashes=wanted.block_hashes,
            prefix_holder=self._prefix_holder(placement),
            num_uncached_tokens=num_uncached_tokens(wanted, num_had),
            num_decode_blocks=max(0, num_blocks - num_own),
            emit=self._emit,
            remaining_ms=self._remaining_ms,
            handoff_wait_s=self._handoff_wait_s,
            times=self._note_placed(placement),
            bounds=self._bounds(),
            itl_target_ms=self._itl_target_ms,
        )
        return attempt, [link for link in (prefill, decode) if link is not None]

    def _bounds(self) -> ReplyBounds:
        return ReplyBounds(
            vocab_size=self._vocab_size,
            num_tokens=len(self._request.prompt_ids) + len(self.journey.stream.tokens),
            block_size=self._registry.block_size,
            num_top=self._request.params.logprobs,
        )

    def _note_placed(self, placement: Placement) -> AttemptTimes:
        times = AttemptTimes(
            number=self.journey.attempt + 1,
            kind=placement.kind.value,
            reason=reason_of(placement).value,
            prefill_worker=placement.prefill_worker,
            decode_worker=placement.decode_worker or "",
            placed_s=asyncio.get_running_loop().time(),
            num_tokens_before=len(self.journey.stream.tokens),
        )
        self._timeline.attempts.append(times)
        return times

    def _prefix_holder(self, placement: Placement) -> pb.PrefixHolder | None:
        """Whom the worker that computes the prompt is to ask; None where that one has gone since."""
        link = None if placement.prefix is None else self._registry.link(placement.prefix.worker_id)
        if placement.prefix is None or link is None:
            return None
        return pb.PrefixHolder(
            address=link.endpoint.address, epoch=link.epoch, num_blocks=placement.prefix.num_blocks
        )

    def _learn(self, failure: AttemptFailure, number: int, placement: Placement) -> None:
        """What the next placement should know of this one."""
        culprit = failure.culprit
        log.info(
            "journey %s, attempt %d failed at %s: %s",
            self.journey.journey_id,
            number,
            culprit.worker_id,
            failure.error.message,
        )
        if not failure.no_room:
            self._failures[culprit.worker_id] = asyncio.get_running_loop().time()
        # The decode worker keeps what was verified: the next attempt takes its lease over, or that of the one before.
        before = placement.request
        had_lease = before.num_own_blocks > 0 and before.preferred_decode == placement.decode_worker
        is_kept = culprit.role is Role.PREFILL and (failure.lease_s > 0 or had_lease)
        link = self._registry.link(placement.decode_worker or "")
        if failure.lease_s > 0 and link is not None:
            self._lease_epoch = link.epoch
            # A third of it may have passed since it was renewed last.
            self._lease_end_s = asyncio.get_running_loop().time() + failure.lease_s * 2 / 3
        self._preferred_decode = (placement.decode_worker or "") if is_kept else ""
        self._num_own_blocks = before.num_decode_blocks if is_kept else 0

    def _has_lease(self) -> bool:
        """Whether the decode worker still has what the last attempt left there: nobody renews it between attempts."""
        link = self._registry.link(self._preferred_decode)
        if link is None or link.state is not LinkState.READY or link.epoch != self._lease_epoch:
            return False
        return asyncio.get_running_loop().time() < self._lease_end_s

    def _is_back(self, worker_id: str, failed_s: float) -> bool:
        """Whether it has come back since: another life, or the same one found again."""
        link = self._registry.link(worker_id)
        return link is not None and link.state is LinkState.READY and link.state_since_s > failed_s

    def _placement_request(self, block_hashes: tuple[bytes, ...]) -> PlacementRequest:
        has_lease = self._has_lease()
        return placement_request(
            self._request,
            num_emitted=len(self.journey.stream.tokens),
            speculate=self._speculate,
            projected_tokens=self._projected_tokens,
            block_size=self._registry.block_size,
            block_hashes=block_hashes,
            avoided=frozenset(self._failures),
            dying=frozenset(name for name, at_s in self._failures.items() if not self._is_back(name, at_s)),
            preferred_decode=self._preferred_decode if has_lease else "",
            num_own_blocks=self._num_own_blocks if has_lease else 0,
            num_local_tokens=self._num_local_tokens,
            may_degrade=self._may_degrade,
        )

    def _release_all_but(self, worker_id: str) -> None:
        for link in [link for link in self._unreleased if link.worker_id != worker_id]:
            link.release(self.journey.journey_id, self._unreleased.pop(link), self.journey.state.value)

    def _remaining_ms(self) -> int:
        return max(1, round((self._end_s - asyncio.get_running_loop().time()) * 1000))
