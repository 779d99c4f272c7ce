"""The comparison finds what differs, down to one bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pd_engine.contracts import api_pb2
from pd_ops.verification.outcome import Outcome, first_difference, logprob_bits, outcome_of

BYTES_PER_TOKEN = 10
EXPECTED = Outcome(
    token_ids=(1, 2), text="ab", finish_reason="length", stop_reason="", seed=3,
    logprobs=(logprob_bits(1, -0.5, [(1, -0.5)]), logprob_bits(2, -1.5, [(7, -0.25)])),
    num_prompt_tokens=4, num_cached_tokens=0, block_checksums=(11, 12), handoff_bytes=None,
)
GOT = replace(EXPECTED, handoff_bytes=40)
ONE_BIT_MORE = math.nextafter(1.5, 2.0)


def test_the_same() -> None:
    assert first_difference(EXPECTED, GOT, bytes_per_token=BYTES_PER_TOKEN) is None


@pytest.mark.parametrize(("change", "message"), [
    ({"token_ids": (1, 3)}, "token 1: 3 instead of 2"),
    ({"token_ids": (1,)}, "1 tokens instead of 2"),
    ({"text": "ac"}, "text: 'ac' instead of 'ab'"),
    ({"finish_reason": "stop"}, "finish_reason"),
    ({"seed": 4}, "seed: 4 instead of 3"),
    ({"num_cached_tokens": 2}, "num_cached_tokens: 2 of 4 is impossible"),
    ({"logprobs": EXPECTED.logprobs[:1]}, "1 logprobs instead of 2"),
    ({"logprobs": (EXPECTED.logprobs[0], logprob_bits(2, -1.5000001, [(7, -0.25)]))}, "logprobs of token 1"),
    ({"logprobs": (EXPECTED.logprobs[0], logprob_bits(2, -1.5, [(8, -0.25)]))}, "logprobs of token 1"),
    ({"block_checksums": (11, 13)}, "block checksum 1: 13 instead of 12"),
    ({"block_checksums": ()}, "0 block checksums instead of 2"),
    ({"handoff_bytes": 30}, "30 bytes were handed over instead of 40"),
    ({"handoff_bytes": None}, "nothing was handed over"),
])
def test_what_differs_is_named(change: dict[str, Any], message: str) -> None:
    difference = first_difference(EXPECTED, replace(GOT, **change), bytes_per_token=BYTES_PER_TOKEN)
    assert difference is not None
    assert message in difference


@pytest.mark.parametrize(("change", "message"), [
    ({"num_cached_tokens": 4}, None),
    ({"num_cached_tokens": 3}, "3 of 4 is impossible"),
    ({"num_cached_tokens": 6}, "6 of 4 is impossible"),
    ({"handoff_bytes": 20, "block_checksums": (0, 12)}, None),
    ({"handoff_bytes": 0, "block_checksums": (0, 0)}, None),
    ({"handoff_bytes": 20, "block_checksums": (0, 13)}, "block checksum 1: 13 instead of 12"),
    ({"handoff_bytes": 20}, "block checksum 0: 11 instead of 0"),
    ({"handoff_bytes": 30}, "instead of 40 less whole blocks of 2 tokens"),
    ({"handoff_bytes": 25}, "instead of 40 less whole blocks of 2 tokens"),
    ({"handoff_bytes": 60}, "instead of 40 less whole blocks of 2 tokens"),
])
def test_over_warm_caches_whole_blocks_may_be_missing_and_nothing_else(
    change: dict[str, Any], message: str | None
) -> None:
    got = replace(GOT, **change)
    difference = first_difference(EXPECTED, got, bytes_per_token=BYTES_PER_TOKEN, shared_block_tokens=2)
    assert difference is None if message is None else message in (difference or "")


def test_a_request_that_ends_with_its_first_token_needs_no_handoff() -> None:
    expected = replace(EXPECTED, token_ids=(1,), logprobs=EXPECTED.logprobs[:1])
    assert first_difference(expected, replace(expected), bytes_per_token=BYTES_PER_TOKEN) is None


def test_a_prompt_that_the_decode_worker_was_to_compute() -> None:
    """Nothing is handed over, and all blocks are what they ought to be, cached ones too."""
    local = replace(EXPECTED, is_local=True)
    for shared in (None, 2):
        def difference(got: Outcome, *, is_local: bool = True, shared: int | None = shared) -> str | None:
            return first_difference(
                EXPECTED, got, bytes_per_token=BYTES_PER_TOKEN, shared_block_tokens=shared, is_local=is_local
            )

        assert difference(local) is None
        assert difference(GOT) == "the decode worker has not computed the prompt"
        assert difference(local, is_local=False) == "the decode worker has computed the prompt"
        assert difference(replace(local, handoff_bytes=40)) == "40 bytes were handed over instead of none"
        assert difference(replace(local, block_checksums=(0, 12))) == "block checksum 0: 0 instead of 11"


def test_signed_zero_and_the_last_bit_count() -> None:
    assert logprob_bits(1, -0.0, []) != logprob_bits(1, 0.0, [])
    assert logprob_bits(1, ONE_BIT_MORE, []) == logprob_bits(1, 1.5, [])  # a double's last bit is no float32's


def test_of_an_answer() -> None:
    complete = api_pb2.GenerateComplete(
        output_ids=[1, 2], text="ab", finish_reason="length", seed=3,
        usage=api_pb2.Usage(prompt_tokens=4, completion_tokens=2),
        logprobs=[
            api_pb2.TokenLogprobs(token_id=1, logprob=-0.5, top_token_ids=[1], top_logprobs=[-0.5]),
            api_pb2.TokenLogprobs(token_id=2, logprob=-1.5, top_token_ids=[7], top_logprobs=[-0.25]),
        ],
        handoff=api_pb2.Handoff(bytes=40, block_checksums=[11, 12]),
    )
    assert outcome_of(complete) == GOT
    complete.ClearField("handoff")
    assert outcome_of(complete).handoff_bytes is None
    complete.local_prefill.block_checksums.extend([11, 12])
    assert outcome_of(complete) == replace(EXPECTED, is_local=True)
