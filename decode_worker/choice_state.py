"""One choice in a decode worker, as its event loop sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from decode_worker.host_tier import Stored
from decode_worker.scheduler import Place
from kv_transfer.journey import JourneyKey
from pd_engine.cache.chain import Chain
from pd_engine.errors import AlreadyExists
from pd_engine.priority import DEFAULT_PRIORITY
from pd_engine.service.prompt_times import PromptTimes
from pd_engine.service.requests import Choice


class ChoiceState(Enum):
    RESERVED = "reserved"  # has a lease
    PULLING = "pulling"    # the handoff is under way
    STALLED = "stalled"    # the handoff has failed and the router was told; the lease waits for the next attempt
    FETCHING = "fetching"  # its prompt's beginning comes from another worker, and the fetch has its blocks
    PREFILLING = "prefilling"  # its blocks are its own; the compute thread computes its prompt
    DECODING = "decoding"  # its blocks are its own; the compute thread works on it
    LEAVING = "leaving"    # its latents are being copied to host memory, after the step under way
    AWAY = "away"          # it is in host memory, and has no blocks
    RETURNING = "returning"  # it has blocks, and its latents are being copied into them
    ENDED = "ended"        # its blocks are free, or will be when the compute thread has let go of them


TRANSITIONS: dict[ChoiceState, frozenset[ChoiceState]] = {
    ChoiceState.RESERVED: frozenset(
        {ChoiceState.PULLING, ChoiceState.FETCHING, ChoiceState.PREFILLING, ChoiceState.ENDED}
    ),
    ChoiceState.PULLING: frozenset({ChoiceState.STALLED, ChoiceState.DECODING, ChoiceState.ENDED}),
    ChoiceState.STALLED: frozenset({ChoiceState.ENDED}),
    ChoiceState.FETCHING: frozenset({ChoiceState.PREFILLING, ChoiceState.ENDED}),
    ChoiceState.PREFILLING: frozenset({ChoiceState.DECODING, ChoiceState.ENDED}),
    ChoiceState.DECODING: frozenset({ChoiceState.LEAVING, ChoiceState.ENDED}),
    ChoiceState.LEAVING: frozenset({ChoiceState.AWAY, ChoiceState.ENDED}),
    ChoiceState.AWAY: frozenset({ChoiceState.RETURNING, ChoiceState.ENDED}),
    ChoiceState.RETURNING: frozenset({ChoiceState.DECODING, ChoiceState.ENDED}),
    ChoiceState.ENDED: frozenset(),
}

LEASED = frozenset({ChoiceState.RESERVED, ChoiceState.PULLING, ChoiceState.STALLED})
PREEMPTED = frozenset({ChoiceState.LEAVING, ChoiceState.AWAY, ChoiceState.RETURNING})
HANDED_OVER = PREEMPTED | {ChoiceState.DECODING}  # or computed here
PROMPTS = frozenset({ChoiceState.FETCHING, ChoiceState.PREFILLING})
BEGUN = HANDED_OVER | PROMPTS


@dataclass(frozen=True, kw_only=True, slots=True)
class ReserveSpec:
    """A checked `Reserve` call.

    Attributes:
        deadline_ms: of the request, from its receipt; 0: none.
        bypass_prefix_cache: every block of the prompt is to be sent.
        cache_salt: choices with different ones share nothing.
        priority: lower ones go first.
    """

    key: JourneyKey
    router_id: str
    choice: Choice
    deadline_ms: int
    report_block_checksums: bool
    bypass_prefix_cache: bool
    cache_salt: str
    priority: int = DEFAULT_PRIORITY


@dataclass(kw_only=True, slots=True, eq=False)
class ChoiceRecord:
    """One attempt.

    Attributes:
        num_blocks: granted.
        lease_block_ids: those of the lease, the destination's until the handoff is complete.
        chain: its tokens as the prefix cache knows them; None without a cache.
        deadline_s, heard_s: on the worker's clock: of the request (None: none), and the last time that its router
            was heard of by name of this journey.
        block_ids: while it is prefilling or decoding, or the compute thread has not let go of them yet.
        num_generated: tokens so far, the emitted ones included.
        num_final_mtp: leading positions whose MTP slots are final.
        place: among all of the worker; a new one once its blocks are its own.
        begun_s: when it began to be computed here.
        num_held_blocks: of a prompt that is computed here, leading blocks that had their contents before.
        num_held_mtp_blocks: of these, leading ones that had MTP's too.
        num_cached_blocks: of these, how many were in the cache, here or at the worker that they were fetched from.
        num_computed: of such a prompt, tokens so far.
        num_moves: how often it was moved to host memory.
        num_generated_before: when it last came back; None while it never was away.
        stored: while it is away.
        num_host_blocks: of the host tier, that are its own.
        in_compute: the compute thread may still write to the blocks.
        told_end: the router was told how it ended.
        prompt_times: where a prompt that is computed here spends its time; None for others.
    """

    spec: ReserveSpec
    num_blocks: int
    lease_block_ids: tuple[int, ...]
    chain: Chain | None
    deadline_s: float | None
    heard_s: float
    state: ChoiceState = ChoiceState.RESERVED
    block_ids: list[int] = field(default_factory=list)
    num_generated: int = 0
    num_final_mtp: int = 0
    place: Place = field(default_factory=Place)
    begun_s: float = 0.0
    num_held_blocks: int = 0
    num_held_mtp_blocks: int = 0
    num_cached_blocks: int = 0
    num_computed: int = 0
    num_moves: int = 0
    num_generated_before: int | None = None
    stored: Stored | None = None
    num_host_blocks: int = 0
    in_compute: bool = False
    told_end: bool = False
    prompt_times: PromptTimes | None = None

    @property
    def name(self) -> str:
        """Of its sequence, and of the owner of its blocks once they are its own: one attempt's."""
        return f"decode:{self.spec.key.journey_id}:{self.spec.key.attempt}"

    @property
    def num_tokens(self) -> int:
        """All of them; the last one has no slot yet."""
        return self.spec.choice.num_prompt_tokens + self.num_generated

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still generate at most."""
        return self.spec.choice.params.max_tokens - self.num_generated

    def check_repeated(self, spec: ReserveSpec) -> None:
        """A `Reserve` of this attempt again may have its lease again.

        Raises:
            AlreadyExists: it has another payload, or its lease has been used.
        """
        if spec != self.spec or self.state not in LEASED:
            what = "has another payload" if spec != self.spec else f"is {self.state.value}"
            raise AlreadyExists(f"attempt {spec.key.attempt} of journey {spec.key.journey_id} {what}")

    def move(self, state: ChoiceState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.name}: {self.state} -> {state}"
        self.state = state
