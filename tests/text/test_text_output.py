"""Output text: whole characters, stop strings, and in sum exactly what decoding at once gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pd_engine.model
from pd_engine.text.output import OutputText
from pd_engine.text.stop import StopMatcher
from pd_engine.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(pd_engine.model.__file__).parent / "demo")
SPECIAL = (0, 1, 3)
BYTE_IDS = [i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1]

ANY_IDS = st.lists(
    st.integers(0, TOKENIZER.vocab_size + 5) | st.sampled_from(BYTE_IDS) | st.sampled_from(SPECIAL), max_size=40
)


def run(ids: list[int], stop: tuple[str, ...]) -> tuple[str, str | None, int]:
    """Text, stop reason and number of tokens taken."""
    output = OutputText(TOKENIZER, stop)
    text = ""
    for count, token_id in enumerate(ids, start=1):
        delta = output.push(token_id)
        text += delta.text
        if delta.stop_reason is not None:
            return text + output.finish(), delta.stop_reason, count
    return text + output.finish(), None, len(ids)


@settings(max_examples=500, deadline=None)
@given(ids=ANY_IDS)
def test_in_sum_it_is_decoding_at_once(ids: list[int]) -> None:
    assert run(ids, ()) == (TOKENIZER.decode(ids), None, len(ids))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_half_a_character_is_never_shown(text: str) -> None:
    ids = [i for byte in text.encode() for i in BYTE_IDS if TOKENIZER.token_bytes(i) == bytes([byte])]
    assert len(ids) == len(text.encode())
    output = OutputText(TOKENIZER)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += output.push(token_id).text
        whole = b"".join(map(TOKENIZER.token_bytes, ids[:count])).decode("utf-8", errors="ignore")
        assert shown == whole
    assert output.finish() == ""


def reference_stop(pieces: list[str], stop: tuple[str, ...], min_pieces: int = 0) -> tuple[str, str | None, int]:
    """By definition: add one character at a time; the first stop string that the text ends with (the longest), if that
    character comes with a later piece than the first `min_pieces`."""
    text = ""
    for count, piece in enumerate(pieces, start=1):
        for char in piece:
            text += char
            found = [s for s in stop if text.endswith(s)]
            if found and count > min_pieces:
                longest = max(found, key=len)
                return text[: len(text) - len(longest)], longest, count
    return text, None, len(pieces)


SMALL = st.text(alphabet="ab<", max_size=4)
STOPS = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@settings(max_examples=800, deadline=None)
@given(pieces=st.lists(SMALL, max_size=12), stop=STOPS, min_pieces=st.sampled_from([0, 0, 1, 3, 6]))
def test_stop_strings_by_definition(pieces: list[str], stop: tuple[str, ...], min_pieces: int) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    for count, piece in enumerate(pieces, start=1):
        step = matcher.push(piece, may_end=count > min_pieces)
        shown += step.text
        if step.stop is not None:
            assert (shown, step.stop, count) == reference_stop(pieces, stop, min_pieces)
            return
        seen = "".join(pieces[:count])
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        # Held back: the longest end of the text that could still become a stop string, and not a character more.
        could = [k for s in stop for k in range(len(s)) if seen.endswith(s[:k])]
        assert len(held) == max(could)
    assert (shown + matcher.finish(), None, len(pieces)) == reference_stop(pieces, stop, min_pieces)


@settings(max_examples=300, deadline=None)
@given(ids=ANY_IDS, data=st.data())
def test_stop_anywhere_in_real_tokens(ids: list[int], data: st.DataObject) -> None:
    """stop-anywhere, at the level of text: a stop string cut from the very text that will come."""
    text = TOKENIZER.decode(ids)
    if not text:
        return
    start = data.draw(st.integers(0, len(text) - 1))
    stop = (text[start : start + data.draw(st.integers(1, 8))],)
    shown, reason, num_taken = run(ids, stop)
    if reason is None:
        assert stop[0].endswith("�")  # only a character that the end of the stream made can be missed
        return
    first = text.index(stop[0])
    assert shown == text[:first]
    assert reason == stop[0]
    without_last = OutputText(TOKENIZER)
    assert stop[0] not in "".join(without_last.push(i).text for i in ids[: num_taken - 1])


def test_a_special_token_is_not_shown_and_another_stop_token_is() -> None:
    [word] = TOKENIZER.encode("the")
    assert run([word, *TOKENIZER.eos_token_ids], ()) == ("the", None, 2)


def test_nothing_comes_after_a_stop() -> None:
    output = OutputText(TOKENIZER, ("the",))
    [word] = TOKENIZER.encode("the")
    assert output.push(word).stop_reason == "the"
    assert output.finish() == ""
    with pytest.raises(AssertionError):
        output.push(word)


@pytest.mark.parametrize("min_tokens", range(8))
def test_a_stop_string_counts_after_min_tokens(min_tokens: int) -> None:
    """One that is completed before is text, even where a longer one still held it back; one that began before counts.
    """
    ids = [token for char in "xababab" for token in TOKENIZER.encode(char)]
    assert len(ids) == 7
    output, shown = OutputText(TOKENIZER, ("ab", "abababz"), min_tokens=min_tokens), ""
    for count, token_id in enumerate(ids, start=1):
        delta = output.push(token_id)
        shown += delta.text
        if delta.stop_reason is not None:
            assert (shown, delta.stop_reason, count) == ("xababab"[: count - 2], "ab", count)
            assert count == min(c for c in (3, 5, 7) if c > min_tokens)
            return
    assert min_tokens == 7
    assert shown + output.finish() == "xababab"


def test_a_stop_string_over_a_token_boundary() -> None:
    ids = TOKENIZER.encode("hello world and more")
    shown, reason, num_taken = run(ids, ("lo wor",))
    assert (shown, reason) == ("hel", "lo wor")
    assert "lo wor" in TOKENIZER.decode(ids[:num_taken])
    assert "lo wor" not in TOKENIZER.decode(ids[: num_taken - 1])
