"""How much of a body is looked at: what a prompt that fills the context can need, and no more.

A parser makes an object of some 50 bytes for every value, and an error of a kilobyte for every one that is wrong, while
the event loop waits. So sizes are checked on the bytes, before any of it is parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pd_engine.errors import InvalidArgument

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_OTHER_VALUES = 65_536  # beside token ids: thousands of messages with their fields, and all options
MAX_CHAR_BYTES = 12  # of one character in JSON: two escaped surrogates
MAX_VALUE_BYTES = 16  # of one other value on average, its name and punctuation included
# An open one ends with the data, so that the time is linear.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """`max_bytes` of the whole; `max_values` in it, counted by commas and brackets."""

    max_bytes: int
    max_values: int

    @staticmethod
    def of_context(*, max_context_length: int, max_token_chars: int) -> BodyBounds:
        """Args:
        max_context_length: tokens. max_token_chars: of the vocabulary's longest token.
        """
        max_values = max_context_length + MAX_OTHER_VALUES
        num_bytes = max_context_length * max_token_chars * MAX_CHAR_BYTES + max_values * MAX_VALUE_BYTES
        return BodyBounds(min(num_bytes, MAX_BODY_BYTES), max_values)

    def check_num_bytes(self, num_bytes: int) -> None:
        """Raises:
        InvalidArgument: too many.
        """
        if num_bytes > self.max_bytes:
            raise InvalidArgument(f"the body must have at most {self.max_bytes} bytes; no longer prompt fits the model")

    def check_num_values(self, data: bytes) -> None:
        """Raises:
        InvalidArgument: too many, in what is JSON or something else.
        """
        max_strings = 2 * self.max_values  # names and values
        structure, num_strings = _STRING.subn(b"", data, count=max_strings + 1)
        num_values = sum(structure.count(mark) for mark in (b",", b"[", b"{"))
        if num_strings > max_strings or num_values > self.max_values:
            raise InvalidArgument(f"the body must be a JSON object of at most {self.max_values} values")
