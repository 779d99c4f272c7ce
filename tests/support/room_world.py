"""A decode worker's core, pool and prefix cache in a world without a model: every slot holds what its tokens make of
it, so that a slot that was lost, mixed up or written by another sequence is seen as soon as it is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from decode_worker.blocks import ChoiceBlocks
from decode_worker.choice_state import ReserveSpec
from decode_worker.core import DecodeCore
from decode_worker.room import RoomKeeper
from decode_worker.tokens_hub import TokensHub
from kv_transfer.journey import JourneyKey, PrefixSource
from kv_transfer.lease import Lease, PullResult
from kv_transfer.manifest import Closing, HiddenState
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.prefix import PrefixCache
from pd_engine.errors import ResourceExhausted
from pd_engine.sampling.params import SamplingParams
from pd_engine.service.requests import Choice
from support.room_fetcher import Fetcher
from support.room_runner import BLOCK_SIZE, LAYOUT, NO_LOGPROBS, Runner, Slots, next_token, slot_value

HOLDER = PrefixSource(address="127.0.0.1:1", epoch="e" * 32, num_blocks=1_000)


class Destination:
    """Stands for `HandoffDestination`: leases on blocks of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.leases: dict[str, tuple[JourneyKey, tuple[int, ...]]] = {}
        self.num_held: dict[str, int] = {}

    def reserve(self, key: JourneyKey, *, num_tokens: int, num_blocks: int, held_block_ids: list[int]) -> Lease:
        assert num_tokens <= num_blocks * BLOCK_SIZE
        self._pool.hold(held_block_ids, key.owner)
        try:
            fresh = self._pool.allocate(num_blocks - len(held_block_ids), key.owner)
        except ResourceExhausted:
            self._pool.release(held_block_ids, key.owner)
            raise
        block_ids = (*held_block_ids, *fresh)
        self.leases[key.journey_id] = key, block_ids
        self.num_held[key.journey_id] = len(held_block_ids)
        return Lease(lease_id="", lease_ms=1, num_held_blocks=len(held_block_ids), block_ids=block_ids)

    def pull(self, key: JourneyKey, lease_id: str, source: Any) -> None:
        return

    def keep(self, key: JourneyKey, lease_id: str) -> Lease:
        _, block_ids = self.leases.pop(key.journey_id)
        return Lease(
            lease_id="", lease_ms=1, num_held_blocks=self.num_held.pop(key.journey_id), block_ids=block_ids
        )

    def renew(self, key: JourneyKey) -> bool:
        return self.leases.get(key.journey_id, (None,))[0] == key

    def release(self, journey_id: str, up_to_attempt: int) -> None:
        _, block_ids = self.leases.pop(journey_id, (None, ()))
        if block_ids:
            self._pool.release(block_ids, JourneyKey(journey_id, 1).owner)


@dataclass
class Request:
    """What a router has of one journey."""

    journey_id: str
    prompt: list[int]
    max_tokens: int
    speculate: int
    cancel_round: int | None
    priority: int = 0
    is_local: bool = False
    deadline_ms: int = 0
    attempt: int = 0
    token_ids: list[int] = field(default_factory=list)
    is_placed: bool = False
    has_ended: bool = False
    pull_round: int = 0

    @property
    def key(self) -> JourneyKey:
        return JourneyKey(self.journey_id, self.attempt)


class World:
    """One worker and one router; `play` until every request has ended."""

    def __init__(
        self, seed: int, *, num_blocks: int, max_host_blocks: int, max_batch: int, projected_tokens: int,
        with_cache: bool, room_class: type[RoomKeeper] = RoomKeeper,
    ) -> None:
        self.random = random.Random(seed)
        self.slots = Slots()
        self.max_host_blocks, self.num_host_blocks = max_host_blocks, 0
        self.pool = BlockPool(num_blocks, on_reuse=self.slots.reused)
        self.cache = PrefixCache(self.pool, fingerprint="f", block_size=BLOCK_SIZE) if with_cache else None
        self.runner = Runner(self, max_batch)
        self.destination = Destination(self.pool)
        self.hub = TokensHub()
        self.commands: list[Callable[[], None]] = []
        self.reports: list[Callable[[], None]] = []
        runner, blocks = cast(Any, self.runner), ChoiceBlocks(self.pool, self.cache, with_mtp=True)
        self.room = room_class(
            pool=self.pool, blocks=blocks, layout=LAYOUT, num_host_blocks=max_host_blocks, max_batch=max_batch,
            runner=runner, post=self.commands.append,
        )
        self.round = 0
        self.core = DecodeCore(
            blocks=blocks, room=self.room, block_size=BLOCK_SIZE, projected_tokens=projected_tokens,
            silence_s=1e9, hub=self.hub, runner=runner, post=self.commands.append,
            report=lambda callback, *args: self.reports.append(lambda: callback(*args)), clock=lambda: self.round,
        )
        self.fetcher = Fetcher(self, blocks)
        self.core.connect(cast(Any, self.destination), cast(Any, self.fetcher))
        self.stream = self.hub.subscribe("router")
        self.most_moves: dict[str, int] = {}  # of each sequence
        self.longest_standstill = 0

    def play(self, requests: list[Request], max_rounds: int = 5_000) -> None:
        waiting, standstill = list(requests), 0
        while not all(request.has_ended for request in requests):
            self.round += 1
            assert self.round < max_rounds, f"these never end: {[r for r in requests if not r.has_ended]}"
            self._reserve(waiting)
            self._hand_over(requests)
            self.fetcher.advance()
            num_running = len(self.core._book.begun)
            num_tokens = self._compute()
            is_busy = num_tokens or not self.fetcher.is_idle
            standstill = 0 if is_busy or not num_running else standstill + 1
            self.longest_standstill = max(self.longest_standstill, standstill)
            self._read(requests, waiting)
            self._cancel(requests)
            self.core.tick(self.round)
            self._check()
        while self.commands or self.core._book.begun or not self.fetcher.is_idle:
            self.round += 1
            self.fetcher.advance()
            self._compute()

    def assert_nothing_is_left(self) -> None:
        (self.cache or self.pool).check_integrity()
        assert self.pool.num_free == self.pool.num_blocks, self.pool.holdings()
        assert (self.num_host_blocks, self.room.host_bytes, self.room.num_preempted) == (0, 0, 0)

    def _reserve(self, waiting: list[Request]) -> None:
        """In order: one that finds no room holds up those behind it."""
        while waiting and self.random.random() < 0.7:
            request = waiting[0]
            if not request.has_ended:
                request.attempt += 1
                try:
                    self.core.reserve(spec_of(request))
                except ResourceExhausted:
                    return
                if not request.is_local:
                    self.core.pull(request.key, "", cast(Any, None))
                request.is_placed = True
                request.pull_round = self.round + self.random.randint(0, 8)
            waiting.pop(0)

    def _hand_over(self, requests: list[Request]) -> None:
        for request in requests:
            is_due = request.is_placed and request.pull_round <= self.round and self.destination.renew(request.key)
            if is_due and request.is_local:
                self.core.compute_prompt(request.key, "", HOLDER)
            elif is_due:
                _, block_ids = self.destination.leases.pop(request.journey_id)
                known = request.prompt + request.token_ids
                for position in range(len(known)):
                    self.slots.write(list(block_ids), position, slot_value(known, position))
                first = next_token(known)
                is_last = len(request.token_ids) + 1 == request.max_tokens
                assert not is_last, "max_tokens 1 is never handed over"
                closing = Closing(
                    first_token_id=first, num_prompt_tokens=len(request.prompt),
                    hidden=HiddenState(data=bytes(4), dtype="fp32", width=1),
                )
                self.core.on_pulled(request.key, PullResult(
                    block_ids=block_ids, closing=closing, num_bytes=0, num_hidden_bytes=0, pull_s=0.0,
                    exposed_s=0.0, transport="", checksums=NO_LOGPROBS,
                ))

    def _compute(self) -> int:
        """The compute thread's commands and one step, then what they report, now or a round later."""
        while self.commands:
            self.commands.pop(0)()
        report = self.runner.step()
        lag = self.random.random() < 0.3
        due = [] if lag else [*self.reports]
        self.reports = [*(self.reports if lag else []), lambda: self.core.steps.on_step(report)]
        for callback in due:
            callback()
        return sum(len(item.tokens) for item in report.progress) + report.prompts.num_tokens

    def _read(self, requests: list[Request], waiting: list[Request]) -> None:
        by_id = {request.journey_id: request for request in requests}
        for event in self.stream.take():
            request = by_id[event.journey.journey_id]
            if event.journey.attempt != request.attempt or request.has_ended:
                continue
            assert event.index == len(request.token_ids) or not event.token_ids, event
            request.token_ids += event.token_ids
            if event.HasField("failure"):
                assert event.failure.retryable, event.failure
                request.is_placed = False
                if request.max_tokens - len(request.token_ids) == 1:
                    request.has_ended = True  # prefill samples the last token
                    request.token_ids.append(next_token(request.prompt + request.token_ids))
                else:
                    waiting.append(request)
            elif event.finish_reason:
                request.has_ended = True
                self.core.release(request.journey_id, request.attempt)

    def _cancel(self, requests: list[Request]) -> None:
        for request in requests:
            if not request.has_ended and request.cancel_round is not None and self.round >= request.cancel_round:
                request.has_ended = True
                self.core.release(request.journey_id, request.attempt)

    def _check(self) -> None:
        (self.cache or self.pool).check_integrity()
        for record in self.core._book.begun.values():
            self.most_moves[record.name] = record.num_moves
            allowed = 1 + (record.num_generated - record.spec.choice.num_emitted_tokens) // 16
            assert record.num_moves <= allowed, f"{record.name} was moved {record.num_moves} times"


def spec_of(request: Request) -> ReserveSpec:
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=request.max_tokens)
    choice = Choice(
        token_ids=(*request.prompt, *request.token_ids), num_prompt_tokens=len(request.prompt), params=params,
        ending_ids=frozenset(), speculate=request.speculate,
    )
    return ReserveSpec(
        key=request.key, router_id="router", choice=choice, deadline_ms=request.deadline_ms,
        report_block_checksums=False, bypass_prefix_cache=False, cache_salt="", priority=request.priority,
    )


def answer(request: Request) -> list[int]:
    """All tokens of a request that runs alone."""
    token_ids = list(request.prompt)
    for _ in range(request.max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(request.prompt) :]
