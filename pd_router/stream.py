"""The tokens of one choice: each index once, in order, with their text, up to where the choice ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pd_engine.errors import DataLoss, InvalidArgument
from pd_engine.sequence import FinishReason, SampledToken
from pd_engine.text.output import TextDelta


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that are new, the first of which has `index`; `text` is what can be shown now and may lag behind."""

    index: int
    tokens: tuple[SampledToken, ...]
    text: str


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why a choice ended. `stop_reason` is the stop string, or the ending token's id in decimal, or empty."""

    finish_reason: FinishReason
    stop_reason: str = ""


class Text(Protocol):
    """As `OutputText`."""

    def push(self, token_id: int) -> TextDelta: ...

    def finish(self) -> str: ...


class TokenStream:
    """Puts what arrives from several workers and attempts into the one stream that the client sees.

    The end is decided here, by the rule of `Sequence.finish_reason` and the stop strings; where a token ends the
    choice in several ways, a stop string counts before an ending token, and that before the length.

    Attributes:
        tokens: known so far, index by index.
        num_replayed: of these, leading ones that the client had before any attempt.
        end: why it has ended, None while it goes on.
    """

    def __init__(self, *, text: Text, ending_ids: frozenset[int], max_tokens: int) -> None:
        self.tokens: list[SampledToken] = []
        self.num_replayed = 0
        self.end: StreamEnd | None = None
        self._output = text
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens
        self._ahead: dict[int, SampledToken] = {}
        self._texts: list[str] = []  # of each token, what it lets show; whatever the chunks were
        self._rest = ""
        self._last: Chunk | None = None  # the last token's, once it was asked for

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def has_begun(self) -> bool:
        """A token has come that was not replayed."""
        return len(self.tokens) > self.num_replayed

    @property
    def text(self) -> str:
        """Shown so far."""
        return "".join(self._texts) + self._rest

    def since(self, index: int) -> Chunk | None:
        """What a reader lacks that has the tokens before `index`; None if it has them all."""
        if index >= len(self.tokens):
            return None
        if index == len(self.tokens) - 1:  # nearly always, and asked for by who sends it to the client, too
            if self._last is None or self._last.index != index:
                self._last = Chunk(index, (self.tokens[index],), self._texts[index])
            return self._last
        return Chunk(index, tuple(self.tokens[index:]), "".join(self._texts[index:]))

    def push(self, index: int, tokens: Sequence[SampledToken]) -> Chunk | None:
        """Takes the tokens from `index` on; those that came before are dropped, those that came too early wait.

        Raises:
            DataLoss: another token was sent at an index, or the index cannot be.
        """
        if self.end is not None:
            return None
        if index + len(tokens) > self._max_tokens:
            raise DataLoss(f"a token at index {index + len(tokens) - 1}, but max_tokens is {self._max_tokens}")
        if len(tokens) == 1 and index == len(self.tokens) and not self._ahead:  # nearly always
            self._append(tokens[0])
            return self.since(index)
        for offset, token in enumerate(tokens):
            self._check_same(index + offset, token)
            if index + offset >= len(self.tokens):
                self._ahead.setdefault(index + offset, token)
        return self._advance()

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Before anything else: the choice goes on after these. False: the last of them ends it, so that there is
        nothing to go on with; the stream is not to be used.

        Raises:
            InvalidArgument: one before the last ends it.
        """
        assert not self.tokens, "a replay comes first"
        for token_id in token_ids:
            if self.end is not None:
                last = len(self.tokens) - 1
                raise InvalidArgument(f"resume_output_ids go on after index {last}, where a choice ends")
            self._append(SampledToken(token_id=token_id))
        self.num_replayed = len(self.tokens)
        return self.end is None

    def restart(self) -> None:
        """Another attempt takes over after the last token that was sent."""
        self._ahead.clear()

    def finish_text(self) -> str:
        """What was held back, for a choice that ends without an end of its own (cancelled)."""
        rest = self._output.finish()
        self._rest += rest
        return rest

    def _check_same(self, index: int, token: SampledToken) -> None:
        known = self.tokens[index] if index < len(self.tokens) else self._ahead.get(index, token)
        if known.token_id != token.token_id:
            raise DataLoss(f"token {token.token_id} at index {index}, where {known.token_id} came before")

    def _advance(self) -> Chunk | None:
        first = len(self.tokens)
        while self.end is None and (token := self._ahead.pop(len(self.tokens), None)) is not None:
            self._append(token)
        return self.since(first)

    def _append(self, token: SampledToken) -> None:
        self.tokens.append(token)
        delta = self._output.push(token.token_id)
        self._texts.append(delta.text)
        self.end = self._end_after(token, delta.stop_reason)
        if self.end is not None:
            self._ahead.clear()
            self._texts[-1] += self._output.finish()

    def _end_after(self, token: SampledToken, stop_string: str | None) -> StreamEnd | None:
        if stop_string is not None:
            return StreamEnd(FinishReason.STOP, stop_string)
        if token.token_id in self._ending_ids:
            return StreamEnd(FinishReason.STOP, str(token.token_id))
        if len(self.tokens) >= self._max_tokens:
            return StreamEnd(FinishReason.LENGTH)
        return None
