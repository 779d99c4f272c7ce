"""What internal calls carry is checked at the door: hostile values get a typed error that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import InvalidArgument
from pd_engine.service import requests
from pd_engine.service.rates import Rate
from pd_engine.service.requests import Limits, parse_choice
from pd_engine.service.tombstones import Tombstones

LIMITS = Limits(vocab_size=100, max_context_length=64, block_size=16, max_speculate=2)


def sampling(**changes: Any) -> pb.Sampling:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 1, "max_tokens": 4, "logprobs": -1, "speculate": 1,
    }
    return pb.Sampling(**(fields | changes))


def test_a_good_request_is_parsed_as_it_is() -> None:
    choice = parse_choice([5, 6, 7, 8], 3, sampling(stop_token_ids=[1, 2], logprobs=2, speculate=5), LIMITS)
    assert choice.token_ids == (5, 6, 7, 8)
    assert (choice.num_prompt_tokens, choice.num_emitted_tokens) == (3, 1)
    assert choice.ending_ids == {1, 2}
    assert choice.speculate == 2
    assert choice.params.logprobs == 2
    assert parse_choice([5], 1, sampling(), LIMITS).params.logprobs is None


def test_absent_fields_change_nothing_and_present_ones_are_taken() -> None:
    assert not parse_choice([5], 1, sampling(), LIMITS).params.changes_logits
    assert parse_choice([5], 1, sampling(), LIMITS).params.min_p == 0
    params = parse_choice([5], 1, sampling(
        min_p=0.25, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=-2.0,
        logit_bias={9: 1.5, 3: -100.0}, min_tokens=4,
    ), LIMITS).params
    assert (params.min_p, params.repetition_penalty, params.min_tokens) == (0.25, 2.0, 4)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -2.0)
    assert params.logit_bias == ((3, -100.0), (9, 1.5))
    with pytest.raises(InvalidArgument, match="repetition_penalty"):
        parse_choice([5], 1, sampling(repetition_penalty=0.0), LIMITS)


@pytest.mark.parametrize(
    ("token_ids", "num_prompt_tokens", "changes", "names"),
    [
        ([], 0, {}, "num_prompt_tokens"),
        ([1, 2], 0, {}, "num_prompt_tokens"),
        ([1, 2], 3, {}, "num_prompt_tokens"),
        ([1, 100], 2, {}, r"token_ids\[1\]"),
        ([2**32 - 1], 1, {}, r"token_ids\[0\]"),
        ([1] * 64, 64, {}, "context"),
        ([1] * 61, 61, {"max_tokens": 4}, "context"),
        ([1, 2, 3], 1, {"max_tokens": 2}, "max_tokens"),
        ([1, 2], 1, {"stop_token_ids": [2]}, "ended"),
        ([1], 1, {"max_tokens": 0}, "max_tokens"),
        ([1], 1, {"max_tokens": 2**32 - 1}, "context"),
        ([1], 1, {"temperature": -0.1}, "temperature"),
        ([1], 1, {"temperature": math.nan}, "temperature"),
        ([1], 1, {"temperature": math.inf}, "temperature"),
        ([1], 1, {"top_p": 0.0}, "top_p"),
        ([1], 1, {"top_p": 1.5}, "top_p"),
        ([1], 1, {"top_k": 0}, "top_k"),
        ([1], 1, {"min_p": 1.5}, "min_p"),
        ([1], 1, {"repetition_penalty": math.nan}, "repetition_penalty"),
        ([1], 1, {"presence_penalty": -2.5}, "presence_penalty"),
        ([1], 1, {"frequency_penalty": math.inf}, "frequency_penalty"),
        ([1], 1, {"logit_bias": {100: 1.0}}, "logit_bias"),
        ([1], 1, {"logit_bias": {1: -101.0}}, "logit_bias"),
        ([1], 1, {"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias"),
        ([1], 1, {"min_tokens": 5}, "min_tokens"),
        ([1], 1, {"top_k": -2}, "top_k"),
        ([1], 1, {"logprobs": -2}, "logprobs"),
        ([1], 1, {"logprobs": 21}, "logprobs"),
        ([1], 1, {"speculate": 99}, "speculate"),
        ([1], 1, {"stop_token_ids": [100]}, "stop_token_ids"),
        ([1], 1, {"stop_token_ids": list(range(100)) * 2}, "stop_token_ids"),
    ],
)
def test_a_bad_choice_names_its_field(
    token_ids: list[int], num_prompt_tokens: int, changes: dict[str, Any], names: str
) -> None:
    with pytest.raises(InvalidArgument, match=names):
        parse_choice(token_ids, num_prompt_tokens, sampling(**changes), LIMITS)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(0, 2**32 - 1), st.binary(max_size=60),
)
def test_anything_else_is_refused_and_never_breaks(token_ids: list[int], num_prompt_tokens: int, data: bytes) -> None:
    try:
        message = pb.Sampling.FromString(data)
    except Exception:  # noqa: BLE001 - gRPC refuses what does not parse before we see it
        message = sampling()
    try:
        choice = parse_choice(token_ids, num_prompt_tokens, message, LIMITS)
    except InvalidArgument:
        return
    assert 1 <= choice.num_prompt_tokens <= len(choice.token_ids)
    assert choice.num_prompt_tokens + choice.params.max_tokens <= LIMITS.max_context_length
    assert all(0 <= token_id < LIMITS.vocab_size for token_id in choice.token_ids)


@pytest.mark.parametrize("value", ["", "g" * 32, "A" * 32, "a" * 31, "a" * 33, "a" * 32 + "\n", "ä" * 32])
def test_hex_ids(value: str) -> None:
    assert requests.parse_hex_id("lease_id", "0123456789abcdef" * 2)
    with pytest.raises(InvalidArgument, match="lease_id"):
        requests.parse_hex_id("lease_id", value)


@pytest.mark.parametrize("value", ["", " ", "a b", "x" * 129, "é", "a\x00b", "a\n"])
def test_router_ids(value: str) -> None:
    assert requests.parse_id("router_id", "router-1@host:2")
    with pytest.raises(InvalidArgument, match="router_id"):
        requests.parse_id("router_id", value)


@pytest.mark.parametrize(
    "value", ["", "host", "host:", ":1", "host:0", "host:65536", "unix:/x", "dns:///h:1", "h/../x:1", "a b:1", "h:１"]
)
def test_addresses(value: str) -> None:
    for good in ("127.0.0.1:1", "a-host.example:65535", "[::1]:50051"):
        assert requests.parse_address("source.address", good) == good
    with pytest.raises(InvalidArgument, match=r"source\.address"):
        requests.parse_address("source.address", value)


def test_block_hashes_held_blocks_leases_salts_and_counts() -> None:
    good = (bytes(16), bytes(16))
    assert requests.parse_block_hashes(good, num_prompt_tokens=40, block_size=16) == good
    assert requests.parse_block_hashes((), num_prompt_tokens=40, block_size=16) == ()
    for bad in ((bytes(16),), (bytes(16), bytes(15)), (bytes(16),) * 3):
        with pytest.raises(InvalidArgument, match="block_hashes"):
            requests.parse_block_hashes(bad, num_prompt_tokens=40, block_size=16)
    assert requests.parse_num_held_blocks(2, num_tokens=40, block_size=16) == 2
    with pytest.raises(InvalidArgument, match="num_held_blocks"):
        requests.parse_num_held_blocks(3, num_tokens=40, block_size=16)
    for lease_ms in (0, 2**32 - 1):
        with pytest.raises(InvalidArgument, match="lease_ms"):
            requests.parse_lease_ms(lease_ms)
    with pytest.raises(InvalidArgument, match="cache_salt"):
        requests.parse_salt("x" * 257)
    with pytest.raises(InvalidArgument, match="journeys"):
        requests.check_count("journeys", 10_001)


def test_tombstones_remember_the_highest_attempt_for_a_while() -> None:
    stones = Tombstones(life_s=10.0, max_entries=3)
    stones.bury("a", 3, 0.0)
    stones.bury("a", 1, 5.0)
    assert [stones.is_gone("a", attempt) for attempt in (1, 3, 4)] == [True, True, False]
    assert not stones.is_gone("b", 1)
    stones.tick(14.9)
    assert stones.is_gone("a", 3)
    stones.tick(15.0)
    assert not stones.is_gone("a", 1)
    for number in range(5):
        stones.bury(str(number), 1, 20.0)
    assert len(stones) == 3
    assert not stones.is_gone("1", 1)
    assert stones.is_gone("4", 1)


def test_a_rate_weighs_steps_by_their_length() -> None:
    rate = Rate()
    assert rate.value == 0.0
    rate.add(100, 0.1)
    assert rate.value == pytest.approx(1_000)
    for _ in range(200):
        rate.add(256, 0.128)
        rate.add(1, 0.128)
    assert rate.value == pytest.approx(257 / 0.256, rel=0.2)
