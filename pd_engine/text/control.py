"""Control tokens and text kept apart: what a client writes can never become a control token.

A checkpoint's added tokens (`<｜User｜>`, `<think>`, ...) are control when the chat template writes them, and plain
text when they stand in a message. Before a template is rendered, every character of a message that could begin or
end a control token is escaped to two private characters; control tokens are then looked for in the rendering, and
the text between them is unescaped. A message without such characters is not changed at all, so the template's text
and the message meet as in a plain rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_ESCAPE = "\ue000"  # private use; itself escaped where a client writes it
_FIRST_CODE = 0xE001


class Escaper:
    """Escapes the first and last characters of all control tokens; `unescape(escape(s)) == s` for every s."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        chars = sorted({_ESCAPE, *(char for token in control_tokens for char in (token[0], token[-1]))})
        assert _FIRST_CODE + len(chars) < 0xF900, len(chars)  # stays within the private-use area
        codes = {char: chr(_FIRST_CODE + i) for i, char in enumerate(chars)}
        self._escapes = str.maketrans({char: _ESCAPE + code for char, code in codes.items()})
        self._chars = {code: char for char, code in codes.items()}
        self._pattern = re.compile(f"{_ESCAPE}([{''.join(self._chars)}])")

    def escape(self, text: str) -> str:
        return text.translate(self._escapes)

    def unescape(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._chars[match[1]], text) if _ESCAPE in text else text


class ControlScanner:
    """Finds control tokens in a text: leftmost first, the longest where several begin."""

    def __init__(self, token_ids: dict[str, int]) -> None:
        self._token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order as non-empty runs of plain text (str) and control tokens (their ids)."""
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            yield self._token_ids[match[0]]
            end = match.end()
        if end < len(text):
            yield text[end:]


def _on_plain_text(name: str) -> Any:
    method: Callable[..., Any] = getattr(str, name)

    def call(self: EscapedText, *args: Any, **kwargs: Any) -> Any:
        plain_args = [arg.plain if isinstance(arg, EscapedText) else arg for arg in args]
        return self.wrap(method(self.plain, *plain_args, **kwargs))

    return call


class EscapedText(str):
    """A message's text inside a template: escaped when it is written out, plain when the template looks at it.

    A template may ask `'</think>' in content`, split there, or strip; such methods act on the plain text and give
    escaped text again. Everything else sees the escaped form, which is safe whatever is done to it.
    """

    escaper: Escaper
    plain: str

    def __new__(cls, plain: str, escaper: Escaper) -> EscapedText:
        self = super().__new__(cls, escaper.escape(plain))
        self.escaper = escaper
        self.plain = plain
        return self

    def wrap(self, value: Any) -> Any:
        if isinstance(value, str):
            return EscapedText(value, self.escaper)
        if isinstance(value, list | tuple):
            return type(value)(self.wrap(item) for item in value)
        return value

    def __hash__(self) -> int:
        return hash(self.plain)

    __contains__ = _on_plain_text("__contains__")
    __eq__ = _on_plain_text("__eq__")
    __ne__ = _on_plain_text("__ne__")
    __getitem__ = _on_plain_text("__getitem__")
    __len__ = _on_plain_text("__len__")
    count = _on_plain_text("count")
    endswith = _on_plain_text("endswith")
    find = _on_plain_text("find")
    index = _on_plain_text("index")
    lower = _on_plain_text("lower")
    lstrip = _on_plain_text("lstrip")
    partition = _on_plain_text("partition")
    removeprefix = _on_plain_text("removeprefix")
    removesuffix = _on_plain_text("removesuffix")
    rfind = _on_plain_text("rfind")
    rpartition = _on_plain_text("rpartition")
    rsplit = _on_plain_text("rsplit")
    rstrip = _on_plain_text("rstrip")
    split = _on_plain_text("split")
    splitlines = _on_plain_text("splitlines")
    startswith = _on_plain_text("startswith")
    strip = _on_plain_text("strip")
    upper = _on_plain_text("upper")
