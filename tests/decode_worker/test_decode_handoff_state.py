"""A sequence out of a handoff: exactly what the source had, or a typed error that names both sides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from decode_worker.handoff_state import check_tokens, handed_over, is_worth_another_try
from kv_transfer.journey import JourneyKey
from kv_transfer.manifest import Closing, HiddenState
from pd_engine.engine import Engine
from pd_engine.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Gone,
    InvalidArgument,
    PdRelayError,
    Unavailable,
)
from pd_engine.model.checkpoint import resolve_model
from pd_engine.sampling.params import SamplingParams
from pd_engine.sequence import SampledToken, Sequence, TokenLogprobs
from pd_engine.service.requests import Choice
from pd_engine.settings import EngineSettings
from pd_engine.steps.state import can_draft
from prefill_worker.publisher import HandoffPublisher

CHOICE = Choice(
    token_ids=(5, 6, 7), num_prompt_tokens=2,
    params=SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, seed=0, max_tokens=9), ending_ids=frozenset({1}),
    speculate=2,
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(resolve_model("demo"), EngineSettings(cache_mib=1), max_speculate=8)


@pytest.fixture
def hidden_1D(engine: Engine) -> torch.Tensor:
    return torch.randn(1, engine.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


class Caught:
    """Stands where a source would be: keeps what is said to it."""

    def __init__(self) -> None:
        self.closing: Closing | None = None
        self.published: list[tuple[int, int]] = []

    def publish(self, key: JourneyKey, component: int, num_valid_tokens: int) -> None:
        self.published.append((component, num_valid_tokens))

    def finish(self, key: JourneyKey, closing: Closing) -> None:
        self.closing = closing


def closing_of(hidden_1D: torch.Tensor, token_id: int = 9) -> Closing:
    """As a prefill worker closes a prompt of three tokens, the second of two emitted ones being the last."""
    caught: Any = Caught()
    sequence = Sequence(
        name="n", token_ids=[5, 6, 7, token_id], num_prompt_tokens=2, params=CHOICE.params,
        ending_ids=CHOICE.ending_ids, num_computed=3, num_computed_mtp=3, pending_hidden=hidden_1D,
    )
    first = SampledToken(token_id=token_id, logprobs=TokenLogprobs(logprob=-1.5, top=((2, -0.5),)))
    publisher = HandoffPublisher(caught, JourneyKey("0" * 32, 1), "bf16", num_cached_tokens=2)
    publisher.finish(sequence, first)
    assert caught.closing is not None
    assert caught.closing.num_cached_tokens == 2
    return caught.closing


def test_the_sequence_goes_on_where_the_prompt_ended(engine: Engine, hidden_1D: torch.Tensor) -> None:
    sequence = handed_over(engine, "n", CHOICE, closing_of(hidden_1D), [3, 4], num_mtp_tokens=3)
    assert sequence.token_ids == [5, 6, 7, 9]
    assert (sequence.num_computed, sequence.num_computed_mtp, sequence.num_generated) == (3, 3, 2)
    assert (sequence.speculate, sequence.block_ids) == (2, [3, 4])
    assert sequence.pending_hidden is not None
    assert torch.equal(sequence.pending_hidden.view(torch.int16), hidden_1D.view(torch.int16))


def test_where_cached_blocks_lack_mtp_slots_nothing_is_drafted(engine: Engine, hidden_1D: torch.Tensor) -> None:
    whole = handed_over(engine, "n", CHOICE, closing_of(hidden_1D), [3, 4], num_mtp_tokens=3)
    lacking = handed_over(engine, "n", CHOICE, closing_of(hidden_1D), [3, 4], num_mtp_tokens=2)
    assert (can_draft(whole), can_draft(lacking)) == (True, False)


def test_a_first_token_that_ends_the_choice_says_so(hidden_1D: torch.Tensor) -> None:
    closing = closing_of(hidden_1D, token_id=1)
    assert closing.finish_reason is not None
    assert (closing.finish_reason.value, closing.stop_reason) == ("stop", "1")
    assert closing_of(hidden_1D).finish_reason is None
    assert closing_of(hidden_1D).logprobs == TokenLogprobs(logprob=-1.5, top=((2, -0.5),))


@pytest.mark.parametrize(
    ("hidden", "says"),
    [
        (None, "no MTP state"),
        (HiddenState(data=bytes(512), dtype="fp32", width=256), "256 x fp32"),
        (HiddenState(data=bytes(256), dtype="bf16", width=128), "128 x bf16"),
        (HiddenState(data=bytes(511), dtype="bf16", width=256), "511 bytes"),
    ],
)
def test_mtp_mismatch(engine: Engine, hidden_1D: torch.Tensor, hidden: HiddenState | None, says: str) -> None:
    closing = dataclasses.replace(closing_of(hidden_1D), hidden=hidden)
    with pytest.raises(FailedPrecondition, match=says):
        handed_over(engine, "n", CHOICE, closing, [3, 4], num_mtp_tokens=3)


@pytest.mark.parametrize("named", [
    {"first_token_id": 4096}, {"logprobs": TokenLogprobs(logprob=-1.0, top=((3, -1.0), (4096, -2.0)))},
])
def test_a_token_outside_the_vocabulary_is_refused(
    engine: Engine, hidden_1D: torch.Tensor, named: dict[str, Any]
) -> None:
    """Whether it ends the request or not, before anybody is told."""
    check_tokens(closing_of(hidden_1D), engine.config.vocab_size)
    closing = dataclasses.replace(closing_of(hidden_1D), **named)
    with pytest.raises(DataLoss, match="4096"):
        check_tokens(closing, engine.config.vocab_size)


@pytest.mark.parametrize(("error", "expected"), [
    (Unavailable(""), True), (DataLoss(""), True), (Gone(), True), (DeadlineExceeded(""), True),
    (InvalidArgument("manifest: nonsense"), True), (Cancelled(""), True), (FailedPrecondition(""), False),
])
def test_what_a_peer_does_wrong_is_tried_with_another_one(error: PdRelayError, expected: bool) -> None:
    assert is_worth_another_try(error) is expected
