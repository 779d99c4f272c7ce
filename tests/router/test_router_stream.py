"""The token stream: whatever order and however often tokens arrive, each index is sent once, in order."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pd_engine.model
from pd_engine.errors import DataLoss
from pd_engine.sequence import FinishReason, SampledToken
from pd_engine.text.output import OutputText
from pd_engine.text.tokenizer import Tokenizer
from pd_router.stream import StreamEnd, TokenStream

TOKENIZER = Tokenizer.load(Path(pd_engine.model.__file__).parent / "demo")


def make(*, stop: tuple[str, ...] = (), ending: frozenset[int] = frozenset(), max_tokens: int = 100) -> TokenStream:
    return TokenStream(text=OutputText(TOKENIZER, stop), ending_ids=ending, max_tokens=max_tokens)


def sampled(ids: list[int]) -> list[SampledToken]:
    return [SampledToken(token_id=token_id) for token_id in ids]


IDS = st.lists(st.integers(5, TOKENIZER.vocab_size - 1), min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(ids=IDS, data=st.data())
def test_any_order_of_arrival_gives_one_stream(ids: list[int], data: st.DataObject) -> None:
    pieces = []
    for _ in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.integers(0, len(ids) - 1))
        pieces.append((start, data.draw(st.integers(start + 1, len(ids)))))
    pieces += [(i, i + 1) for i in range(len(ids))]
    stream = make(max_tokens=len(ids))
    text, sent = "", []
    for start, end in data.draw(st.permutations(pieces)):
        chunk = stream.push(start, sampled(ids[start:end]))
        if chunk is not None:
            assert chunk.index == len(sent)
            sent += [token.token_id for token in chunk.tokens]
            text += chunk.text
    assert sent == stream.token_ids == ids
    assert text == stream.text == TOKENIZER.decode(ids)
    assert stream.end == StreamEnd(FinishReason.LENGTH)


@settings(max_examples=300, deadline=None)
@given(ids=IDS, data=st.data())
def test_stop_anywhere_in_an_accepted_run(ids: list[int], data: st.DataObject) -> None:
    """stop-anywhere: however many tokens arrive at once, the end is where it is with one at a time."""
    text = TOKENIZER.decode(ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = (text[start : start + data.draw(st.integers(1, 5))],) if text else ()
    ending = frozenset(data.draw(st.lists(st.sampled_from(ids), max_size=1)))
    max_tokens = data.draw(st.integers(1, len(ids)))

    def run(cuts: list[int]) -> TokenStream:
        stream = make(stop=stop, ending=ending, max_tokens=max_tokens)
        shown = ""
        for begin, end in itertools.pairwise(cuts):
            chunk = stream.push(begin, sampled(ids[begin:end]))
            shown += chunk.text if chunk is not None else ""
        assert shown == stream.text
        return stream

    plain = run(list(range(max_tokens + 1)))
    cuts = sorted({0, max_tokens, *data.draw(st.lists(st.integers(0, max_tokens), max_size=5))})
    speculated = run(cuts)
    assert plain.end is not None
    assert (speculated.token_ids, speculated.text, speculated.end) == (plain.token_ids, plain.text, plain.end)


def test_a_stop_string_counts_before_an_ending_token_and_that_before_the_length() -> None:
    [word] = TOKENIZER.encode("the")
    stream = make(stop=("he",), ending=frozenset({word}), max_tokens=1)
    stream.push(0, sampled([word]))
    assert stream.end == StreamEnd(FinishReason.STOP, "he")
    assert stream.text == "t"
    stream = make(ending=frozenset({word}), max_tokens=1)
    stream.push(0, sampled([word]))
    assert stream.end == StreamEnd(FinishReason.STOP, str(word))
    assert stream.text == "the"


def test_nothing_follows_the_end() -> None:
    stream = make(max_tokens=2)
    chunk = stream.push(0, sampled([7, 8]))
    assert chunk is not None
    assert len(chunk.tokens) == 2
    assert stream.push(0, sampled([7, 8, 9])) is None
    assert stream.token_ids == [7, 8]


def test_another_token_at_an_index_is_data_loss() -> None:
    stream = make()
    stream.push(0, sampled([7]))
    with pytest.raises(DataLoss, match="token 8 at index 0, where 7 came before"):
        stream.push(0, sampled([8]))
    stream.push(2, sampled([9]))
    with pytest.raises(DataLoss, match="at index 2"):
        stream.push(1, sampled([5, 10]))
    assert stream.token_ids == [7]


def test_an_index_beyond_max_tokens_is_data_loss() -> None:
    with pytest.raises(DataLoss, match="index 3, but max_tokens is 3"):
        make(max_tokens=3).push(2, sampled([7, 8]))


def test_a_new_attempt_forgets_what_came_too_early() -> None:
    stream = make()
    assert stream.push(1, sampled([9])) is None
    stream.restart()
    chunk = stream.push(0, sampled([7, 8]))
    assert chunk is not None
    assert stream.token_ids == [7, 8]


def test_a_cancelled_stream_shows_what_was_held_back() -> None:
    stream = make(stop=("the end",))
    [word] = TOKENIZER.encode("the")
    stream.push(0, sampled([word]))
    assert stream.text == ""
    assert stream.finish_text() == "the"
    assert stream.text == "the"
