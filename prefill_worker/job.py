"""One prompt in a prefill worker, as its event loop sees it: state, blocks, answers and who waits for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.journey import JourneyKey, PrefixSource, SourceInfo
from pd_engine.cache.chain import Chain
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import PdRelayError
from pd_engine.priority import DEFAULT_PRIORITY, Turn
from pd_engine.sequence import SampledToken
from pd_engine.service.prompt_times import PromptTimes
from pd_engine.service.requests import Choice


class JobState(Enum):
    QUEUED = "queued"      # waits for blocks
    FETCHING = "fetching"  # its beginning comes from another worker; the fetch has its blocks
    RUNNING = "running"    # has blocks; the compute thread works on it
    SERVED = "served"      # its first token is known
    FAILED = "failed"      # it has ended without one


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.FETCHING, JobState.RUNNING, JobState.FAILED}),
    JobState.FETCHING: frozenset({JobState.QUEUED, JobState.RUNNING, JobState.FAILED}),
    JobState.RUNNING: frozenset({JobState.SERVED, JobState.FAILED}),
    JobState.SERVED: frozenset(),
    JobState.FAILED: frozenset(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillSpec:
    """A checked `Prefill` call.

    Attributes:
        deadline_ms: of the request, from its receipt; 0: none.
        no_handoff: nobody will pull.
        bypass_prefix_cache: take nothing from the prefix cache.
        cache_salt: prompts with different ones share nothing.
        priority: lower ones go first.
        prefix_holder: who may have the beginning cached; None: nobody is to be asked.
    """

    key: JourneyKey
    router_id: str
    choice: Choice
    lease_ms: int
    num_held_blocks: int
    deadline_ms: int
    no_handoff: bool
    bypass_prefix_cache: bool
    cache_salt: str
    priority: int = DEFAULT_PRIORITY
    prefix_holder: PrefixSource | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.choice.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstTokenAnswer:
    """Attributes:
    index: of the token among the generated ones.
    finish_reason: "stop" or "length" if it ends the choice, else empty.
    stop_reason: the stop token's id in decimal, else empty.
    num_cached_tokens: of the prompt, that were cached (`PromptBlocks.num_cached_tokens`).
    times: where it spent its time here.
    """

    index: int
    token: SampledToken
    finish_reason: str
    stop_reason: str
    num_cached_tokens: int
    times: pb.PromptTimes


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """Attributes:
    turn: when it is its turn, and its deadline.
    chain: its tokens as the prefix cache knows them; None without a cache.
    num_cached_blocks: leading blocks that were in the cache when it got its blocks, or were fetched since.
    tried_to_fetch: blocks of another worker, with or without success.
    num_computed: tokens that the compute thread has done, or found done.
    in_compute: the compute thread may still write to the blocks.
    pinned: the handoff's source still serves the blocks.
    settled_at_s: when it was served or failed.
    listeners: events to set when there is news; one a caller that waits.
    times: where it spends its time here.
    """

    spec: PrefillSpec
    num_blocks: int
    turn: Turn
    chain: Chain | None = None
    state: JobState = JobState.QUEUED
    num_overtaken: int = 0
    num_cached_blocks: int = 0
    tried_to_fetch: bool = False
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    in_compute: bool = False
    pinned: bool = False
    settled_at_s: float = 0.0
    source: SourceInfo | None = None
    first: FirstTokenAnswer | None = None
    error: PdRelayError | None = None
    listeners: list[asyncio.Event] = field(default_factory=list)
    times: PromptTimes = field(init=False)

    def __post_init__(self) -> None:
        self.times = PromptTimes(arrived_s=self.turn.arrived_s)

    @property
    def name(self) -> str:
        """Of its sequence, and of the owner of its blocks: one attempt's, as two may overlap for a step."""
        return f"prefill:{self.spec.key.journey_id}:{self.spec.key.attempt}"

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute."""
        return self.spec.num_tokens - self.num_computed if self.is_open else 0

    @property
    def is_open(self) -> bool:
        return self.state in (JobState.QUEUED, JobState.FETCHING, JobState.RUNNING)

    @property
    def holds_blocks(self) -> bool:
        return bool(self.block_ids)

    def move(self, state: JobState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.name}: {self.state} -> {state}"
        self.state = state

    def notify(self) -> None:
        for event in self.listeners:
            event.set()
