"""What each router is sent: one stream a (router, worker) pair for all its journeys, a message a step.

The hub keeps what a journey has said so far, not a queue of messages: a stream has a cursor into each journey and
takes whatever is new. So a slow router gets fewer, larger messages, a router that reconnects gets everything again
from the first index (it drops what it has), and memory is bounded by the journeys' own tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.journey import JourneyKey
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.sequence import SampledToken
from pd_engine.service.wire import logprobs_message

MAX_TOKENS_A_MESSAGE = 4_096
ENDED_LIFE_S = 10.0  # how long an end that was sent is kept, for a router that lost its stream just then


@dataclass(kw_only=True, slots=True, eq=False)
class Story:
    """What one attempt of a journey has said so far.

    Attributes:
        first_index: of tokens[0] among the generated tokens.
        accepted, drafted: running totals.
        ended_at_s: when `finish_reason` or `failure` was set.
    """

    key: JourneyKey
    router_id: str
    first_index: int
    tokens: list[SampledToken] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    finish_reason: str = ""
    stop_reason: str = ""
    failure: pb.Failure | None = None
    handoff: pb.HandoffDone | None = None
    local_prefill: pb.LocalPrefillDone | None = None
    ended_at_s: float | None = None
    end_taken: bool = False


@dataclass(slots=True)
class _Cursor:
    """How much of a story one stream has taken."""

    num_tokens: int = 0
    handoff: bool = False
    local_prefill: bool = False


class Subscription:
    """One router's stream. `wait` until there is news, then `take` it."""

    def __init__(self) -> None:
        self._cursors: dict[JourneyKey, _Cursor] = {}
        self._news: dict[JourneyKey, Story] = {}
        self._event = asyncio.Event()
        self.replaced = False

    def add(self, story: Story) -> None:
        self._news[story.key] = story
        self._event.set()

    def forget(self, key: JourneyKey) -> None:
        self._news.pop(key, None)
        self._cursors.pop(key, None)

    def replace(self) -> None:
        """A newer stream of the same router has taken over: this one ends."""
        self.replaced = True
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> list[pb.TokensEvent]:
        """All news, up to `MAX_TOKENS_A_MESSAGE` tokens; the rest is news for the next call."""
        events: list[pb.TokensEvent] = []
        room = MAX_TOKENS_A_MESSAGE
        for key in list(self._news):
            if room <= 0:
                return events
            story = self._news.pop(key)
            cursor = self._cursors.setdefault(key, _Cursor())
            tokens = story.tokens[cursor.num_tokens : cursor.num_tokens + room]
            room -= len(tokens)
            events.append(_event(story, cursor, tokens))
            cursor.num_tokens += len(tokens)
            if cursor.num_tokens < len(story.tokens):
                self._news[key] = story
            elif story.ended_at_s is not None:
                story.end_taken = True
                del self._cursors[key]
        self._event.clear()
        if self._news:
            self._event.set()
        return events


def _event(story: Story, cursor: _Cursor, tokens: Sequence[SampledToken]) -> pb.TokensEvent:
    event = pb.TokensEvent(
        journey=pb.JourneyRef(journey_id=story.key.journey_id, attempt=story.key.attempt),
        index=story.first_index + cursor.num_tokens,
        token_ids=[token.token_id for token in tokens],
        logprobs=[message for token in tokens if (message := logprobs_message(token)) is not None],
        accepted_tokens=story.accepted,
        drafted_tokens=story.drafted,
    )
    if story.handoff is not None and not cursor.handoff:
        cursor.handoff = True
        event.handoff.CopyFrom(story.handoff)
    if story.local_prefill is not None and not cursor.local_prefill:
        cursor.local_prefill = True
        event.local_prefill.CopyFrom(story.local_prefill)
    if cursor.num_tokens + len(tokens) == len(story.tokens):
        event.finish_reason = story.finish_reason
        event.stop_reason = story.stop_reason
        if story.failure is not None:
            event.failure.CopyFrom(story.failure)
    return event


class TokensHub:
    """All stories of a worker. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._stories: dict[JourneyKey, Story] = {}
        self._subscriptions: dict[str, Subscription] = {}

    @property
    def num_open(self) -> int:
        """Stories that go on, or whose end no stream has taken yet."""
        return sum(not story.end_taken for story in self._stories.values())

    @property
    def num_streams(self) -> int:
        return len(self._subscriptions)

    def knows(self, key: JourneyKey) -> bool:
        """Whether it goes on, or has ended so lately that its router may not have read the end."""
        return key in self._stories

    def subscribe(self, router_id: str) -> Subscription:
        """A new stream for this router: it begins with everything known; an older one of the same router ends."""
        old = self._subscriptions.pop(router_id, None)
        if old is not None:
            old.replace()
        subscription = self._subscriptions[router_id] = Subscription()
        for story in self._stories.values():
            if story.router_id == router_id:
                subscription.add(story)
        return subscription

    def unsubscribe(self, router_id: str, subscription: Subscription) -> None:
        if self._subscriptions.get(router_id) is subscription:
            del self._subscriptions[router_id]

    def is_listening(self, router_id: str) -> bool:
        return router_id in self._subscriptions

    def open(self, key: JourneyKey, router_id: str, first_index: int) -> None:
        assert key not in self._stories, key
        self._stories[key] = Story(key=key, router_id=router_id, first_index=first_index)

    def push(self, key: JourneyKey, tokens: Sequence[SampledToken], *, accepted: int = 0, drafted: int = 0) -> None:
        """More tokens; `accepted` and `drafted` are the totals so far."""
        story = self._stories[key]
        story.tokens.extend(tokens)
        story.accepted, story.drafted = accepted, drafted
        self._tell(story)

    def set_handoff(self, key: JourneyKey, handoff: pb.HandoffDone) -> None:
        story = self._stories[key]
        story.handoff = handoff
        self._tell(story)

    def set_local_prefill(self, key: JourneyKey, local_prefill: pb.LocalPrefillDone) -> None:
        """Told with the first token, which follows."""
        self._stories[key].local_prefill = local_prefill

    def finish(self, key: JourneyKey, finish_reason: str, stop_reason: str, now_s: float) -> None:
        story = self._stories[key]
        assert story.ended_at_s is None, story
        story.finish_reason, story.stop_reason, story.ended_at_s = finish_reason, stop_reason, now_s
        self._tell(story)

    def fail(self, key: JourneyKey, failure: pb.Failure, now_s: float) -> None:
        story = self._stories[key]
        assert story.ended_at_s is None, story
        story.failure, story.ended_at_s = failure, now_s
        self._tell(story)

    def forget(self, key: JourneyKey) -> None:
        """Nothing more is sent of it: its router has released it."""
        story = self._stories.pop(key, None)
        if story is not None and story.router_id in self._subscriptions:
            self._subscriptions[story.router_id].forget(key)

    def forget_up_to(self, journey_id: str, attempt: int) -> None:
        """`forget` of every attempt up to this one."""
        for key in [key for key in self._stories if key.journey_id == journey_id and key.attempt <= attempt]:
            self.forget(key)

    def tick(self, now_s: float) -> None:
        """Forgets ends that have been kept long enough."""
        for key, story in list(self._stories.items()):
            if story.ended_at_s is not None and now_s >= story.ended_at_s + ENDED_LIFE_S:
                self.forget(key)

    def _tell(self, story: Story) -> None:
        subscription = self._subscriptions.get(story.router_id)
        if subscription is not None:
            subscription.add(story)
