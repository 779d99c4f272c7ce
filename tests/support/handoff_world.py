"""Both sides of handoffs with their pools and memory, a network that a test drives step by step, and a clock that it
sets. The production classes do all the work; what a transport and a worker would do around them is done here.

Everything that must always hold is checked by `handoff_checks.check`; what must hold at an event, at that event.
"""

from __future__ import annotations

import secrets

from kv_transfer.destination_state import Broke, Completed, Ended, LeaseRecord, LeaseState
from kv_transfer.journey import JourneyKey, SourceInfo
from kv_transfer.manifest import Closing
from kv_transfer.publisher import Progress
from kv_transfer.source_state import MARGIN_S, SourceEnd, SourceHandoff, SourceState
from pd_engine.cache.arena import Arena
from pd_engine.cache.blocks import BlockPool
from pd_engine.cache.layout import CacheLayout
from pd_engine.errors import Gone, PdRelayError, ResourceExhausted, Unavailable
from pd_engine.sequence import FinishReason
from pd_engine.service.tombstones import LONGEST_MESSAGE_LIFE_S
from support.handoff_prefixes import Held, give_prefixes
from support.handoff_prompt import PAGED, Prompt
from support.handoff_sides import Destination, Job, Parts, Source, Stream, Transfer

LEASE_MS = 1_000
LEASE_S = LEASE_MS / 1000
NUM_BLOCKS = 14
MAX_BYTES_IN_FLIGHT = 300
FETCH_BYTES = 100


class World:
    """Sources and destinations; every public method is one step."""

    def __init__(self, parts: Parts | None = None, *, layout: CacheLayout = PAGED, num_sources: int = 2,
                 num_destinations: int = 2) -> None:
        self.parts = parts or Parts()
        self.layout = layout
        self.now_s = 100.0
        self._names = 0
        self._arenas: list[Arena] = []
        self.sources = [self._new_source() for _ in range(num_sources)]
        self.destinations = [self._new_destination() for _ in range(num_destinations)]
        self.prompts: dict[str, Prompt] = {}
        self.infos: dict[JourneyKey, tuple[Source, SourceInfo]] = {}
        self.by_token: dict[str, Source] = {}
        self.pullers: dict[str, LeaseRecord] = {}  # by token
        self.leases: dict[JourneyKey, tuple[Destination, LeaseRecord]] = {}
        self.streams: list[Stream] = []
        self.transfers: list[Transfer] = []
        self.commits: list[tuple[Source, JourneyKey, str]] = []
        self.kept: list[tuple[Source, Prompt]] = []  # prompts that a source has computed, and may still have cached
        self.held: list[Held] = []
        self.held_until_s: dict[JourneyKey, float] = {}
        self._releases: dict[tuple[Destination, str], tuple[int, float]] = {}
        self._source_releases: dict[tuple[Source, str], int] = {}
        self.num_completed = 0
        self.num_wrong_without_fault = 0

    # The router.

    def new_journey(self, num_tokens: int, like: str | None = None) -> str:
        """Of a prompt of its own, or of the same as another journey's."""
        self._names += 1
        journey_id = f"{self._names:032x}"
        self.prompts[journey_id] = self.prompts[like] if like else Prompt(self.layout, num_tokens, self._names)
        return journey_id

    def reserve(self, key: JourneyKey, index: int, num_extra_blocks: int = 0) -> LeaseRecord | None:
        """With the leading full blocks of a running sequence of the same prompt, if there is one, as held blocks."""
        destination, prompt = self.destinations[index], self.prompts[key.journey_id]
        num_blocks = self.layout.num_blocks_for(prompt.num_tokens) + num_extra_blocks
        try:
            lease = destination.book.reserve(
                key, lease_id=secrets.token_hex(16), lease_ms=LEASE_MS, num_tokens=prompt.num_tokens,
                num_blocks=num_blocks, held_block_ids=self.held_of(destination, prompt), now_s=self.now_s,
            )
        except (Gone, ResourceExhausted):
            lease = None
        self.settle(destination)
        if lease is not None:
            assert lease.key.attempt > self._released(destination, key.journey_id), f"{key} was released before"
            assert len(set(lease.block_ids)) == len(lease.block_ids), f"{key}: a block twice in one lease"
            assert lease.num_held_blocks == 0 or self.layout is PAGED, f"{key}: blocks that cannot be shared are held"
            self.leases[key] = (destination, lease)
        return lease

    def begin(self, key: JourneyKey, index: int) -> SourceInfo | None:
        """A prefill worker takes the prompt in, for the lease that the destination has granted."""
        source, prompt = self.sources[index], self.prompts[key.journey_id]
        if key not in self.leases or source.book.get(key) is not None:
            return None
        num_held = self.leases[key][1].num_held_blocks
        try:
            blocks = source.pool.allocate(self.layout.num_blocks_for(prompt.num_tokens), key.owner)
        except ResourceExhausted:
            return None
        handoff = SourceHandoff(
            key=key, token=secrets.token_hex(16), block_ids=tuple(blocks),
            generations=tuple(int(source.arena.generations[block]) for block in blocks),
            num_tokens=prompt.num_tokens, num_held_blocks=num_held, deadline_s=self.now_s + LEASE_S + MARGIN_S,
        )
        source.blocks[key] = blocks
        try:
            source.book.begin(handoff, self.now_s)
        except Gone:
            del source.blocks[key]
            source.pool.release(blocks, key.owner)
            return None
        progress = Progress(source.arena, handoff.block_ids, handoff.generations, prompt.num_tokens, num_held)
        source.jobs[key] = Job(handoff, progress, prompt, [0] * len(self.layout.components))
        self.settle_source(source)
        info = SourceInfo(address=str(index), epoch=source.epoch, token=handoff.token)
        self.infos[key], self.by_token[info.token] = (source, info), source
        return info

    def pull(self, key: JourneyKey) -> None:
        """The router tells the destination where the source is."""
        if key not in self.infos or key not in self.leases:
            return
        source, info = self.infos[key]
        destination, lease = self.leases[key]
        try:
            started = destination.book.pull(key, lease.lease_id, info, self.now_s)
        except Gone:
            assert destination.book.get(key) is None, f"{key} is live, but its pull is gone"
            return
        if started is None:
            return
        assert started is lease
        try:
            handoff = source.book.open(
                key, info.token, source_epoch=info.epoch, puller_epoch=destination.epoch, lease_ms=LEASE_MS,
                now_s=self.now_s,
            )
        except Gone as error:
            self.break_pull(destination, lease, error)
            return
        assert source.epoch == info.epoch, f"{key}: another life of the source serves its manifest"
        self.pullers[info.token] = lease
        self.streams.append(Stream(destination, lease, source, handoff))

    def release(self, journey_id: str, up_to_attempt: int, *, at_source: int | None = None,
                at_destination: int | None = None) -> None:
        if at_source is not None:
            source = self.sources[at_source]
            highest = max(up_to_attempt, self._source_releases.get((source, journey_id), 0))
            self._source_releases[source, journey_id] = highest
            source.book.release(journey_id, up_to_attempt, self.now_s)
            self.settle_source(source)
            assert all(
                key.attempt > up_to_attempt for key in self.sources[at_source].book.live_keys()
                if key.journey_id == journey_id
            )
        if at_destination is not None:
            destination = self.destinations[at_destination]
            destination.book.release(journey_id, up_to_attempt, self.now_s)
            highest = max(up_to_attempt, self._released(destination, journey_id))
            self._releases[destination, journey_id] = (highest, self.now_s)
            self.settle(destination)
            assert all(
                key.attempt > up_to_attempt for key in destination.book.live_keys() if key.journey_id == journey_id
            )

    def renew_at_destination(self, key: JourneyKey) -> None:
        if key in self.leases:
            destination, _ = self.leases[key]
            destination.book.renew(key, self.now_s)

    # The prefill worker.

    def compute(self, job: Job, num_tokens: int) -> None:
        """The next tokens, in the component that lags behind most; what has become final is announced."""
        component = job.computed.index(min(job.computed))
        first = job.computed[component]
        end = min(first + num_tokens, job.prompt.num_tokens)
        source = self._source_of(job)
        if source is None or first == end:
            return
        job.prompt.write(source.arena, job.handoff.block_ids, component, first, end)
        job.computed[component] = end
        records = job.progress.advance(component, end, self.parts.checksums)
        source.book.publish(job.handoff.key, records)

    def compute_all(self, job: Job) -> None:
        """The rest of the prompt, and its first token."""
        while min(job.computed) < job.prompt.num_tokens and self._source_of(job) is not None:
            self.compute(job, job.prompt.num_tokens)
        self.close(job)

    def close(self, job: Job, *, ends_request: bool = False) -> None:
        """The first token is sampled."""
        source = self._source_of(job)
        if source is None or not (ends_request or min(job.computed) == job.prompt.num_tokens):
            return
        del source.jobs[job.handoff.key]
        reason = FinishReason.STOP if ends_request else None
        closing = Closing(first_token_id=1, num_prompt_tokens=job.prompt.num_tokens, finish_reason=reason)
        source.book.close(job.handoff.key, closing)
        self.settle_source(source)

    def steal(self, stream: Stream) -> None:
        """Somebody who has the capability, but is another life of the destination, or means another source's life."""
        key, token = stream.handoff.key, stream.handoff.token
        own = stream.source.epoch
        for source_epoch, puller_epoch in ((own, secrets.token_hex(16)), ("0" * 32, stream.destination.epoch)):
            try:
                stream.source.book.open(key, token, source_epoch=source_epoch, puller_epoch=puller_epoch,
                                        lease_ms=LEASE_MS, now_s=self.now_s)
            except Gone:
                continue
            raise AssertionError(f"{key}: a manifest was opened for another epoch")

    # Time and death.

    def cut(self, stream: Stream) -> None:
        """The connection is lost for good."""
        self.break_pull(stream.destination, stream.lease, Unavailable("cut"))

    def advance(self, seconds: float, *, hears: bool = True) -> None:
        """Time passes; renewals are sent and answered, or lost."""
        self.now_s += seconds
        for destination in self.destinations:
            for lease in destination.book.renewals_due(self.now_s):
                if hears:
                    self._renew(destination, lease)
            destination.book.tick(self.now_s)
            self.settle(destination)
        for source in self.sources:
            source.book.tick(self.now_s)
            self.settle_source(source)

    def restart_source(self, index: int) -> None:
        """Killed and started again at the same address: a new epoch; the old memory stays readable to who mapped it."""
        old = self.sources[index]
        self.sources[index] = self._new_source()
        self.commits = [commit for commit in self.commits if commit[0] is not old]
        for stream in [stream for stream in self.streams if stream.source is old]:
            self.cut(stream)

    def restart_destination(self, index: int) -> None:
        old = self.destinations[index]
        self.destinations[index] = self._new_destination()
        self.streams = [stream for stream in self.streams if stream.destination is not old]
        self.transfers = [transfer for transfer in self.transfers if transfer.destination is not old]

    def end_running(self, destination: Destination, key: JourneyKey) -> None:
        """The sequence has been decoded: its prompt is still intact, its blocks are freed."""
        blocks = destination.running.pop(key)
        self.prompts[key.journey_id].assert_in(destination.arena, blocks)
        destination.pool.release(blocks, f"running:{key.journey_id}:{key.attempt}")

    def dispose(self) -> None:
        for arena in self._arenas:
            arena.close()

    def new_name(self) -> str:
        self._names += 1
        return f"stranger-{self._names}"

    # For the network.

    def settle(self, destination: Destination) -> None:
        for news in destination.book.take_news():
            match news:
                case Completed(lease):
                    self._completed(destination, lease)
                case Broke(lease, _, _):
                    self._drop_stream(lease)
                case Ended(lease):
                    self._end(destination, lease, lease.state.value)
                    self._drop_stream(lease)
                    for transfer in self.transfers:
                        if transfer.fetch.lease is lease:
                            transfer.is_given_up = True

    def _completed(self, destination: Destination, lease: LeaseRecord) -> None:
        self._drop_stream(lease)
        assert lease.source is not None
        self.commits.append((self.by_token[lease.source.token], lease.key, lease.source.token))
        if lease.state is LeaseState.FINISHED:
            return
        self._end(destination, lease, "committed")
        self.num_completed += 1
        self.prompts[lease.key.journey_id].assert_in(destination.arena, lease.block_ids)
        destination.running[lease.key] = lease.block_ids
        destination.pool.transfer(
            lease.block_ids, lease.key.owner, f"running:{lease.key.journey_id}:{lease.key.attempt}"
        )

    def _end(self, destination: Destination, lease: LeaseRecord, how: str) -> None:
        assert lease.key not in destination.ends, f"{lease.key} ended twice: {destination.ends[lease.key]}, then {how}"
        destination.ends[lease.key] = how

    def settle_source(self, source: Source) -> None:
        for handoff in source.book.take_ended():
            self._assert_may_end(source, handoff)
            source.jobs.pop(handoff.key, None)
            blocks = source.blocks.pop(handoff.key)
            if handoff.key in source.holds:
                source.holds.pop(handoff.key)(handoff.key, SourceEnd(handoff.state.value))
            else:
                source.pool.release(blocks, handoff.key.owner)

    def _assert_may_end(self, source: Source, handoff: SourceHandoff) -> None:
        """Pins end for a reason, and expire only after every lease that counts on them: that of a destination which
        died stays as it was, and ends at the deadline that it knew (the lease's own, if nothing renews it)."""
        key, puller = handoff.key, self.pullers.get(handoff.token)
        if handoff.state is SourceState.COMMITTED:
            ends_request = handoff.closing is not None and handoff.closing.finish_reason is not None
            done = LeaseState.FINISHED if ends_request else LeaseState.COMMITTED
            assert puller is not None and puller.state is done, f"{key} was committed too early"
        if handoff.state is SourceState.RELEASED:
            assert self._source_releases.get((source, key.journey_id), 0) >= key.attempt, (
                f"the pins of {key} ended although nobody released it"
            )
        if handoff.state is SourceState.EXPIRED and puller is not None and puller.state is LeaseState.PULLING:
            counts_until_s = puller.deadline_s if puller.is_prefix else puller.peer_deadline_s
            assert counts_until_s < self.now_s, f"the pins of {key} expired before its lease"

    def break_pull(self, destination: Destination, lease: LeaseRecord, error: PdRelayError) -> None:
        destination.book.break_pull(lease, error)
        self.settle(destination)
        self._drop_stream(lease)

    def _drop_stream(self, lease: LeaseRecord) -> None:
        self.streams = [stream for stream in self.streams if stream.lease is not lease]

    def _renew(self, destination: Destination, lease: LeaseRecord) -> None:
        assert lease.source is not None
        source = self.by_token[lease.source.token]
        handoff = source.book.by_token(lease.source.token)
        if handoff is None or source not in self.sources:
            self.break_pull(destination, lease, Gone())
            return
        source.book.renew(handoff, LEASE_MS, self.now_s)
        destination.book.heard(lease, self.now_s)
        assert handoff.deadline_s >= lease.deadline_s, f"the pins of {lease.key} end before its lease"

    def held_of(self, destination: Destination, prompt: Prompt) -> tuple[int, ...]:
        """Leading full blocks of the prompt that a running sequence has."""
        if self.layout is PAGED:
            for key, blocks in destination.running.items():
                other = self.prompts[key.journey_id]
                if other.seed == prompt.seed:
                    return blocks[: min(other.num_tokens, prompt.num_tokens) // self.layout.block_size]
        return ()

    def _released(self, destination: Destination, journey_id: str) -> int:
        """The highest attempt whose late calls must be refused there."""
        attempt, released_s = self._releases.get((destination, journey_id), (0, 0.0))
        return attempt if self.now_s < released_s + LONGEST_MESSAGE_LIFE_S else 0

    def _source_of(self, job: Job) -> Source | None:
        for source in self.sources:
            if source.jobs.get(job.handoff.key) is job and job.handoff.state is SourceState.PUBLISHING:
                return source
        return None

    def is_pinned(self, transfer: Transfer) -> bool:
        assert transfer.fetch.lease.source is not None
        token = transfer.fetch.lease.source.token
        return any(
            source.arena is transfer.source_arena and source.book.by_token(token) is not None for source in self.sources
        )

    def _new_source(self) -> Source:
        arena = Arena(self.layout, NUM_BLOCKS)
        self._arenas.append(arena)
        epoch = secrets.token_hex(16)
        source = Source(
            arena=arena, pool=BlockPool(NUM_BLOCKS, on_reuse=arena.renew), epoch=epoch,
            book=self.parts.source_book(epoch),
        )
        give_prefixes(self, source)
        return source

    def _new_destination(self) -> Destination:
        arena = Arena(self.layout, NUM_BLOCKS)
        self._arenas.append(arena)
        pool = BlockPool(NUM_BLOCKS, on_reuse=arena.renew)
        book = self.parts.destination_book(
            self.layout, pool, max_bytes_in_flight=MAX_BYTES_IN_FLIGHT, max_refetches=1,
            fetch_bytes=FETCH_BYTES,
        )
        return Destination(arena=arena, pool=pool, epoch=secrets.token_hex(16), book=book)
