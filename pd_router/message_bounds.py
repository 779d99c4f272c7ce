"""How much of a gRPC message is parsed: what a prompt that fills the context can need, and no more.

In the wire format an empty message in a list takes two bytes and becomes an object of a hundred, so a message is small
only if it has few fields. They are counted on the bytes, before any is parsed; the event loop waits meanwhile, which
is why the count ends at the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor

from pd_engine.errors import InvalidArgument

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_OTHER_FIELDS = 32_768  # beside one a token: thousands of messages with their fields, ids to abort, all options
MAX_OTHER_BYTES = 4 * 1024 * 1024
MAX_CHAR_BYTES = 4  # of one character in UTF-8
MAX_VARINT_BYTES = 10
MAX_DEPTH = 16

VARINT, FIXED64, LENGTH, START_GROUP, END_GROUP, FIXED32 = range(6)
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """`max_bytes` of the whole; `max_fields` in it, those of messages in it included.

    `messages`: what is known of each call's request, by the call's path.
    """

    max_bytes: int
    max_fields: int
    messages: Mapping[str, Descriptor]

    @staticmethod
    def of_context(service: ServiceDescriptor, *, max_context_length: int, max_token_chars: int) -> MessageBounds:
        """Args:
        max_context_length: tokens. max_token_chars: of the vocabulary's longest token.
        """
        num_bytes = max_context_length * max(max_token_chars * MAX_CHAR_BYTES, MAX_VARINT_BYTES) + MAX_OTHER_BYTES
        return MessageBounds(
            max_bytes=min(num_bytes, MAX_MESSAGE_BYTES),
            max_fields=max_context_length + MAX_OTHER_FIELDS,
            messages={f"/{service.full_name}/{method.name}": method.input_type for method in service.methods},
        )

    def check(self, path: str, data: bytes) -> None:
        """Of a call's request, unparsed. What is not in the wire format is left to the parser to refuse.

        Raises:
            InvalidArgument: it has too many fields, or messages in messages too deep.
        """
        descriptor = self.messages.get(path)
        if descriptor is not None and len(data) > self.max_fields:  # a field has two bytes or more
            _Counter(self.max_fields).count(data, descriptor)


class _Counter:
    def __init__(self, max_fields: int) -> None:
        self._max_fields = max_fields
        self._num_fields = 0

    def count(self, data: bytes, descriptor: Descriptor) -> None:
        """Goes through the message, and into those in it that the descriptor knows."""
        pending = [(0, len(data), descriptor, 0)]
        while pending:
            at, end, descriptor, depth = pending.pop()
            while at < end:
                self._note_field()
                try:
                    tag, at = _varint(data, at)
                    kind = tag & 7
                    size, at = _varint(data, at) if kind == LENGTH else (FIXED_BYTES.get(kind, 0), at)
                    if kind == VARINT:
                        _, at = _varint(data, at)
                except IndexError:
                    break
                if kind == LENGTH and (inner := _message_in(descriptor, tag >> 3)) is not None:
                    if depth == MAX_DEPTH:
                        raise InvalidArgument(f"at most {MAX_DEPTH} messages may lie in each other")
                    pending.append((at, min(at + size, end), inner, depth + 1))
                at += size

    def _note_field(self) -> None:
        self._num_fields += 1
        if self._num_fields > self._max_fields:
            raise InvalidArgument(f"the request must have at most {self._max_fields} fields; no longer prompt fits")


def _message_in(descriptor: Descriptor, number: int) -> Descriptor | None:
    field = descriptor.fields_by_number.get(number)
    return field.message_type if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where the next byte is).

    Raises:
        IndexError: the data ends before it does, or it is too long to be one.
    """
    value = shift = 0
    while shift < 7 * MAX_VARINT_BYTES:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError("a varint of more than ten bytes")
