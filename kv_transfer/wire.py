"""Msgpack with strict limits: every field of a map is read once, by type and range; what is left over is refused.

Nothing is ever unpickled, and no size that a peer states is believed before it is checked.
"""

from __future__ import annotations

import ipaddress
import math
from typing import Any

import msgpack

from pd_engine.errors import InvalidArgument

MAX_PART_BYTES = 1 << 20
MAX_ITEMS = 4096  # of one array or map
MAX_IP_CHARS = 64  # with an IPv6 zone


def pack(value: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)  # type: ignore[no-untyped-call]
    return packed


def unpack(data: bytes, where: str, *, max_bytes: int = MAX_PART_BYTES) -> Fields:
    """The map in `data`.

    Raises:
        InvalidArgument: it is too long, truncated, followed by something, not UTF-8 where it says text, or no map.
    """
    if len(data) > max_bytes:
        raise InvalidArgument(f"{where}: at most {max_bytes} bytes are allowed, got {len(data)}")
    try:
        value = msgpack.unpackb(  # type: ignore[attr-defined, no-untyped-call]
            data, raw=False, strict_map_key=True, max_str_len=MAX_ITEMS, max_bin_len=max_bytes,
            max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidArgument(f"{where}: not valid msgpack: {type(error).__name__}") from None
    return Fields(value, where)


class Fields:
    """One map while it is read. Each reader takes its field out; `done` refuses what nobody asked for."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise InvalidArgument(f"{where}: must be a map, got {type(value).__name__}")
        if not all(type(key) is str for key in value):
            raise InvalidArgument(f"{where}: keys must be text")
        self._values: dict[str, Any] = value
        self.where = where

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number in low..high, both included."""
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise InvalidArgument(f"{self.where}: {name} must be a whole number in [{low}, {high}], got {_show(value)}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in low..high, or None where the field is nil."""
        if self._values.get(name, 0) is None:
            return self._take(name)  # type: ignore[no-any-return]
        return self.integer(name, low, high)

    def number(self, name: str) -> float:
        """A float; infinities are allowed, NaN is not."""
        value = self._take(name)
        if type(value) is not float or math.isnan(value):
            raise InvalidArgument(f"{self.where}: {name} must be a number, got {_show(value)}")
        return value

    def boolean(self, name: str) -> bool:
        value = self._take(name)
        if type(value) is not bool:
            raise InvalidArgument(f"{self.where}: {name} must be true or false, got {_show(value)}")
        return value

    def text(self, name: str, max_chars: int) -> str:
        value = self._take(name)
        if type(value) is not str or len(value) > max_chars:
            allowed = f"text of at most {max_chars} characters"
            raise InvalidArgument(f"{self.where}: {name} must be {allowed}, got {_show(value)}")
        return value

    def ip_address(self, name: str) -> str:
        """Of a host: a name would have to be looked up, which takes as long as it takes."""
        value = self._take(name)
        try:
            if type(value) is str and len(value) <= MAX_IP_CHARS:
                return str(ipaddress.ip_address(value))
        except ValueError:
            pass
        raise InvalidArgument(f"{self.where}: {name} must be an IP address, got {_show(value)}")

    def octets(self, name: str, max_bytes: int) -> bytes:
        value = self._take(name)
        if type(value) is not bytes or len(value) > max_bytes:
            raise InvalidArgument(f"{self.where}: {name} must be at most {max_bytes} bytes, got {_show(value)}")
        return value

    def items(self, name: str, max_items: int) -> list[Any]:
        value = self._take(name)
        if type(value) is not list or len(value) > max_items:
            raise InvalidArgument(f"{self.where}: {name} must be a list of at most {max_items}, got {_show(value)}")
        return value

    def fields(self, name: str) -> Fields:
        """A map inside this one."""
        return Fields(self._take(name), f"{self.where}.{name}")

    def optional_fields(self, name: str) -> Fields | None:
        """A map inside this one, or None where the field is nil."""
        value = self._take(name)
        return None if value is None else Fields(value, f"{self.where}.{name}")

    def raw(self, name: str) -> Any:
        """The value as it came, for somebody else to check."""
        return self._take(name)

    def names(self) -> list[str]:
        """What has not been read yet."""
        return list(self._values)

    def done(self) -> None:
        if self._values:
            raise InvalidArgument(f"{self.where}: unknown field {_show(next(iter(self._values)))}")

    def _take(self, name: str) -> Any:
        if name not in self._values:
            raise InvalidArgument(f"{self.where}: {name} is missing")
        return self._values.pop(name)


def _show(value: object) -> str:
    text = repr(value) if isinstance(value, (int, float, str, bool)) or value is None else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
