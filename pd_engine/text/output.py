"""The text of a stream of tokens: whole characters only, up to the first stop string."""

from __future__ import annotations

import codecs
from typing import NamedTuple

from pd_engine.text.stop import StopMatcher
from pd_engine.text.tokenizer import Tokenizer

_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")


class TextDelta(NamedTuple):
    """Text to show after one token; may lag behind it. `stop_reason` is the stop string that the token completed."""

    text: str
    stop_reason: str | None = None


class OutputText:
    """Turns tokens into text as they come.

    Without a stop string the texts of all `push` and of `finish` joined are `tokenizer.decode` of all tokens. With
    one, the token that completes it is the last to be pushed, the text ends before it, and `finish` gives nothing.
    Stop strings that one of the first `min_tokens` tokens completes are text like any other.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._decoder = _UTF8_DECODER(errors="replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._ended = False

    def push(self, token_id: int) -> TextDelta:
        assert not self._ended, "a token after the end"
        self._num_tokens += 1
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._matcher is None:
            return TextDelta(text)
        step = self._matcher.push(text, may_end=self._num_tokens > self._min_tokens)
        self._ended = step.stop is not None
        return TextDelta(step.text, step.stop)

    def finish(self) -> str:
        """What was held back, once no more tokens come: half a character shows as U+FFFD, as `decode` gives it."""
        if self._ended:
            return ""
        self._ended = True
        held = "" if self._matcher is None else self._matcher.finish()
        return held + self._decoder.decode(b"", final=True)
