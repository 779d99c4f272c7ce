"""The journey's state machine under random events: one terminal state, every index once, stale attempts ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import pd_engine.model
from pd_engine.errors import DataLoss, Internal, InvalidArgument, PdRelayError, ResourceExhausted, Unavailable
from pd_engine.sequence import SampledToken
from pd_engine.text.output import OutputText
from pd_engine.text.tokenizer import Tokenizer
from pd_router.journey import TERMINAL, TRANSITIONS, HandoffReport, Journey, JourneyState
from pd_router.stream import TokenStream

TOKENIZER = Tokenizer.load(Path(pd_engine.model.__file__).parent / "demo")
MAX_TOKENS = 8
MAX_ATTEMPTS = 3
ANSWER = [100 + i for i in range(MAX_TOKENS)]
S = JourneyState


def make(max_tokens: int = MAX_TOKENS, ending: frozenset[int] = frozenset()) -> Journey:
    stream = TokenStream(text=OutputText(TOKENIZER), ending_ids=ending, max_tokens=max_tokens)
    return Journey("ab" * 16, stream, max_attempts=MAX_ATTEMPTS)


def tokens(start: int, end: int) -> list[SampledToken]:
    return [SampledToken(token_id=token_id) for token_id in ANSWER[start:end]]


class JourneyMachine(RuleBasedStateMachine):
    """Random calls, of the present and of older attempts; a model beside it knows what must come of them."""

    def __init__(self) -> None:
        super().__init__()
        self.journey = make()
        self.sent: list[int] = []
        self.terminal: JourneyState | None = None
        self.counted = 0

    def attempts(self) -> st.SearchStrategy[int]:
        return st.integers(max(0, self.journey.attempt - 2), self.journey.attempt + 1)

    @precondition(lambda self: self.journey.state is S.WAITING)
    @rule(with_decode=st.booleans())
    def place(self, with_decode: bool) -> None:
        before = self.journey.attempt
        assert self.journey.place(with_decode=with_decode) == before + 1
        assert self.journey.state is (S.RESERVING if with_decode else S.PREFILLING)

    @rule(data=st.data())
    def reserved(self, data: st.DataObject) -> None:
        attempt = data.draw(self.attempts())
        expected = attempt == self.journey.attempt and self.journey.state is S.RESERVING
        assert self.journey.reserved(attempt) is expected

    @rule(data=st.data())
    def source(self, data: st.DataObject) -> None:
        attempt = data.draw(self.attempts())
        expected = attempt == self.journey.attempt and self.journey.state is S.PREFILLING
        assert self.journey.source_known(attempt) is expected

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        attempt = data.draw(self.attempts())
        start = data.draw(st.integers(0, MAX_TOKENS - 1))
        end = data.draw(st.integers(start + 1, MAX_TOKENS))
        acts = attempt == self.journey.attempt and self.journey.state in (S.PREFILLING, S.PULLING, S.DECODING)
        before = self.journey.state
        chunk = self.journey.take_tokens(attempt, start, tokens(start, end))
        if not acts:
            assert chunk is None
            assert self.journey.state is before
        if chunk is not None:
            assert chunk.index == len(self.sent)
            self.sent += [token.token_id for token in chunk.tokens]
            assert self.journey.state is (S.LENGTH if len(self.sent) == MAX_TOKENS else S.DECODING)

    @rule(data=st.data(), retryable=st.booleans(), counts=st.booleans())
    def fail(self, data: st.DataObject, retryable: bool, counts: bool) -> None:
        attempt = data.draw(self.attempts())
        acts = attempt == self.journey.attempt and self.journey.state not in (*TERMINAL, S.WAITING)
        before = self.journey.state
        self.journey.fail_attempt(attempt, Unavailable("gone"), retryable=retryable, counts=counts)
        if not acts:
            assert self.journey.state is before
            return
        self.counted += counts
        if retryable and self.counted < MAX_ATTEMPTS:
            assert self.journey.state is S.WAITING
        else:
            assert self.journey.state is S.FAILED

    @rule()
    def cancel(self) -> None:
        before = self.journey.state
        self.journey.cancel()
        assert self.journey.state is (before if before in TERMINAL else S.CANCELLED)

    @rule()
    def give_up(self) -> None:
        before = self.journey.state
        self.journey.give_up(ResourceExhausted("full"))
        if before in TERMINAL:
            assert self.journey.state is before
        else:
            assert self.journey.state is (S.FAILED if self.sent else S.REJECTED)

    @invariant()
    def each_index_once_in_order(self) -> None:
        assert self.sent == ANSWER[: len(self.sent)] == self.journey.stream.token_ids

    @invariant()
    def one_terminal_state(self) -> None:
        if self.terminal is not None:
            assert self.journey.state is self.terminal
        elif self.journey.ended:
            self.terminal = self.journey.state
        assert (self.journey.error is not None) == (self.journey.state in (S.REJECTED, S.FAILED, S.CANCELLED))


JourneyMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestJourneyMachine = JourneyMachine.TestCase


def test_every_state_is_reached_and_every_end_is_one() -> None:
    reached = {S.WAITING}.union(*TRANSITIONS.values())
    assert reached == set(JourneyState)
    assert {S.STOPPED, S.LENGTH, S.CANCELLED, S.REJECTED, S.FAILED} == TERMINAL


def test_an_illegal_transition_names_both_states() -> None:
    journey = make()
    journey.place(with_decode=True)
    with pytest.raises(AssertionError, match="reserving -> reserving"):
        journey.place(with_decode=True)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (InvalidArgument("no"), S.REJECTED),
        (ResourceExhausted("full"), S.REJECTED),
        (Unavailable("dead"), S.FAILED),
        (Internal("bug"), S.FAILED),
    ],
)
def test_refused_before_a_token_is_rejected(error: PdRelayError, state: JourneyState) -> None:
    journey = make()
    attempt = journey.place(with_decode=True)
    journey.fail_attempt(attempt, error, retryable=False)
    assert journey.state is state
    assert journey.error is error


def test_refused_before_any_attempt_is_rejected() -> None:
    journey = make()
    journey.give_up(Unavailable("no worker"))
    assert journey.state is S.REJECTED


def test_after_a_token_it_has_failed() -> None:
    journey = make()
    attempt = journey.place(with_decode=False)
    journey.take_tokens(attempt, 0, tokens(0, 1))
    journey.fail_attempt(attempt, InvalidArgument("no"), retryable=False)
    assert journey.state is S.FAILED


def test_totals_of_drafts_add_up_over_attempts() -> None:
    journey = make()
    first = journey.place(with_decode=False)
    journey.note_drafts(first, num_accepted=1, num_drafted=2)
    journey.note_drafts(first, num_accepted=3, num_drafted=5)
    journey.fail_attempt(first, Unavailable("x"), retryable=True)
    second = journey.place(with_decode=False)
    journey.note_drafts(first, num_accepted=90, num_drafted=90)
    journey.note_drafts(second, num_accepted=1, num_drafted=1)
    assert (journey.num_accepted, journey.num_drafted) == (4, 6)


def test_a_contradicting_token_leaves_the_state_to_the_caller() -> None:
    journey = make()
    attempt = journey.place(with_decode=False)
    journey.take_tokens(attempt, 0, tokens(0, 1))
    with pytest.raises(DataLoss):
        journey.take_tokens(attempt, 0, tokens(1, 2))
    assert journey.state is S.DECODING


def test_notes_of_another_attempt_are_ignored() -> None:
    journey = make()
    journey.place(with_decode=False)
    report = HandoffReport(
        prefill_worker="p", decode_worker="d", num_bytes=1, num_hidden_bytes=1, pull_s=0.1, exposed_s=0.0,
        transport="tcp", block_checksums=(),
    )
    journey.note_handoff(7, report)
    journey.note_cached_tokens(7, 5)
    assert journey.handoff is None
    assert journey.num_cached_tokens is None
    journey.note_cached_tokens(1, 5)
    journey.note_cached_tokens(1, 9)
    assert journey.num_cached_tokens == 5
