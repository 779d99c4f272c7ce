"""The multiplexed stream: whatever a stream misses, a router that keeps one copy by index has every token once."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.tokens_hub import ENDED_LIFE_S, MAX_TOKENS_A_MESSAGE, Subscription, TokensHub
from kv_transfer.journey import JourneyKey
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.sequence import SampledToken, TokenLogprobs

KEYS = [JourneyKey(f"{number:032x}", 1) for number in range(3)]


def tokens(*token_ids: int) -> list[SampledToken]:
    return [SampledToken(token_id=token_id) for token_id in token_ids]


class Router:
    """Keeps one copy of each token by its index, as the real one does."""

    def __init__(self) -> None:
        self.tokens: dict[str, dict[int, int]] = defaultdict(dict)
        self.ends: dict[str, str] = {}
        self.handoffs: list[str] = []

    def read(self, subscription: Subscription) -> None:
        for event in subscription.take():
            copy = self.tokens[event.journey.journey_id]
            for index, token_id in enumerate(event.token_ids, event.index):
                assert copy.setdefault(index, token_id) == token_id
            if event.finish_reason or event.HasField("failure"):
                self.ends[event.journey.journey_id] = event.finish_reason or event.failure.code
            if event.HasField("handoff"):
                self.handoffs.append(event.journey.journey_id)


actions = st.lists(
    st.tuples(st.sampled_from(["push", "read", "lose a message", "reconnect"]), st.integers(0, 2), st.integers(0, 3)),
    max_size=60,
)


@settings(deadline=None)
@given(actions)
def test_no_token_is_lost_or_changed_whatever_the_streams_do(steps: list[tuple[str, int, int]]) -> None:
    hub, router = TokensHub(), Router()
    stream = hub.subscribe("r")
    expected: dict[str, list[int]] = {}
    for number, key in enumerate(KEYS):
        hub.open(key, "r", first_index=number)
        expected[key.journey_id] = []
    for action, number, count in steps:
        key = KEYS[number]
        if action == "push":
            new = [len(expected[key.journey_id]) + extra for extra in range(count)]
            expected[key.journey_id] += new
            hub.push(key, tokens(*new))
        elif action == "read":
            router.read(stream)
        else:
            if action == "lose a message":
                stream.take()
            hub.unsubscribe("r", stream)
            stream = hub.subscribe("r")
    for key in KEYS:
        hub.finish(key, "length", "", 0.0)
    router.read(stream)
    for number, key in enumerate(KEYS):
        copy = router.tokens[key.journey_id]
        assert [copy[index] for index in sorted(copy)] == expected[key.journey_id]
        assert sorted(copy) == list(range(number, number + len(copy)))
        assert router.ends[key.journey_id] == "length"
    assert hub.num_open == 0


def test_a_step_is_one_message_for_all_journeys_of_a_router_and_none_for_others() -> None:
    hub = TokensHub()
    mine, other = hub.subscribe("mine"), hub.subscribe("other")
    for key in KEYS:
        hub.open(key, "mine", 0)
        hub.push(key, tokens(1, 2), accepted=1, drafted=1)
    events = mine.take()
    assert [event.journey.journey_id for event in events] == [key.journey_id for key in KEYS]
    assert all((event.accepted_tokens, event.drafted_tokens) == (1, 1) for event in events)
    assert other.take() == []
    assert mine.take() == []


async def test_waiting_ends_with_news_and_starts_anew_after_it_was_taken() -> None:
    hub = TokensHub()
    stream = hub.subscribe("r")
    hub.open(KEYS[0], "r", 0)
    hub.push(KEYS[0], tokens(5))
    await stream.wait()
    stream.take()
    assert not stream._event.is_set()


def test_a_newer_stream_of_a_router_ends_the_older_one() -> None:
    hub = TokensHub()
    old = hub.subscribe("r")
    new = hub.subscribe("r")
    assert old.replaced
    assert not new.replaced
    hub.unsubscribe("r", old)
    assert hub.is_listening("r")
    hub.unsubscribe("r", new)
    assert not hub.is_listening("r")


def test_long_stories_are_split_and_end_with_their_last_part() -> None:
    hub = TokensHub()
    hub.open(KEYS[0], "r", 0)
    hub.push(KEYS[0], tokens(*range(MAX_TOKENS_A_MESSAGE + 5)))
    hub.finish(KEYS[0], "stop", "7", 0.0)
    stream = hub.subscribe("r")
    [first], [second] = stream.take(), stream.take()
    assert (first.index, len(first.token_ids), first.finish_reason) == (0, MAX_TOKENS_A_MESSAGE, "")
    assert (second.index, len(second.token_ids), second.finish_reason) == (MAX_TOKENS_A_MESSAGE, 5, "stop")
    assert second.stop_reason == "7"
    assert stream.take() == []


def test_logprobs_handoff_and_failure_travel() -> None:
    hub = TokensHub()
    hub.open(KEYS[0], "r", 3)
    hub.set_handoff(KEYS[0], pb.HandoffDone(bytes=12, transport="tcp", block_checksums=[2**64 - 1]))
    sampled = SampledToken(token_id=9, logprobs=TokenLogprobs(logprob=-0.5, top=((9, -0.5), (1, -2.0))))
    hub.push(KEYS[0], [sampled])
    hub.fail(KEYS[0], pb.Failure(code="data_loss", retryable=True, missing_blocks=[4]), 0.0)
    [event] = hub.subscribe("r").take()
    assert event.handoff.block_checksums == [2**64 - 1]
    assert (event.index, list(event.token_ids)) == (3, [9])
    assert [(lp.token_id, lp.logprob, list(lp.top_token_ids)) for lp in event.logprobs] == [(9, -0.5, [9, 1])]
    assert (event.failure.code, list(event.failure.missing_blocks)) == ("data_loss", [4])


def test_the_handoff_is_told_once_a_stream() -> None:
    hub, router = TokensHub(), Router()
    stream = hub.subscribe("r")
    hub.open(KEYS[0], "r", 0)
    hub.set_handoff(KEYS[0], pb.HandoffDone(bytes=1))
    router.read(stream)
    hub.push(KEYS[0], tokens(1))
    router.read(stream)
    assert router.handoffs == [KEYS[0].journey_id]


def test_what_was_released_is_not_sent_and_ends_are_forgotten_in_time() -> None:
    hub = TokensHub()
    stream = hub.subscribe("r")
    for key in KEYS:
        hub.open(key, "r", 0)
        hub.push(key, tokens(1))
    hub.forget(KEYS[0])
    hub.forget(KEYS[0])
    hub.finish(KEYS[1], "stop", "", 100.0)
    assert [event.journey.journey_id for event in stream.take()] == [key.journey_id for key in KEYS[1:]]
    assert hub.num_open == 1
    hub.tick(100.0 + ENDED_LIFE_S)
    assert [event.journey.journey_id for event in hub.subscribe("r").take()] == [KEYS[2].journey_id]
