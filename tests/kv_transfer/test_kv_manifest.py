"""Manifests: what is packed comes back equal; what is malformed is refused with the field named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import numpy as np
import pytest

from kv_transfer.manifest import PIECE_RECORD, Closing, Failed, Hello, HiddenState, Opening, Part, Pieces
from kv_transfer.manifest_wire import MAX_PIECES_IN_PART, pack_hello, pack_part, unpack_hello, unpack_part
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.errors import ErrorCode, InvalidArgument
from pd_engine.sequence import FinishReason, TokenLogprobs

LAYOUT = CacheLayout(
    block_size=16,
    components=(
        Component(name="layers.0", kind=ComponentKind.PAGED, width=576, dtype="bf16"),
        Component(name="layers.0.window", kind=ComponentKind.RING, width=64, dtype="bf16", window_slots=128),
        Component(name="layers.0.state", kind=ComponentKind.SNAPSHOT, width=32, dtype="fp32"),
        Component(name="mtp.0", kind=ComponentKind.PAGED, width=576, dtype="bf16", first_position=1),
    ),
)
HELLO = Hello(
    worker_id="decode-0", fingerprint="ab12", layout=LAYOUT, host_id="host", transports=("shared_memory", "tcp"),
    checksums=True, lease_ms=10_000,
)
OPENING = Opening(
    worker_id="prefill-0", epoch="a" * 32, fingerprint="ab12", layout=LAYOUT, host_id="host", num_tokens=100,
    num_held_blocks=2, num_arena_blocks=64, lease_ms=10_000, checksums=True,
    transports={"shared_memory": {"path": "p"}, "tcp": {"host": "h", "port": 9}},
)
CLOSING = Closing(
    first_token_id=5, num_prompt_tokens=100, num_cached_tokens=16,
    logprobs=TokenLogprobs(logprob=-0.25, top=((5, -0.25), (9, -math.inf))), finish_reason=FinishReason.LENGTH,
    stop_reason="5", hidden=HiddenState(data=bytes(range(8)), dtype="bf16", width=4),
)
FAILED = Failed(code=ErrorCode.UNAVAILABLE, message="no room")


def records(count: int) -> np.ndarray:
    made = np.zeros(count, dtype=PIECE_RECORD)
    made["block"] = np.arange(count)
    made["num_valid"] = 16
    made["checksum"] = (1 << 64) - 1
    return made


@pytest.mark.parametrize("part", [OPENING, CLOSING, dataclasses.replace(CLOSING, logprobs=None, hidden=None), FAILED])
def test_a_part_comes_back_equal(part: Part) -> None:
    assert unpack_part(pack_part(part)) == part


@pytest.mark.parametrize("count", [1, MAX_PIECES_IN_PART])
def test_pieces_come_back_equal(count: int) -> None:
    part = unpack_part(pack_part(Pieces(records(count))))
    assert isinstance(part, Pieces)
    assert part.records.tobytes() == records(count).tobytes()


def test_hello_comes_back_equal() -> None:
    assert unpack_hello(pack_hello(HELLO)) == HELLO


def changed(part: Part | Hello, *path: str | int, value: Any) -> bytes:
    """The packed part with one field replaced; `...` removes it."""
    data = msgpack.unpackb(pack_hello(part) if isinstance(part, Hello) else pack_part(part))
    target = data
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return msgpack.packb(data)


BAD_OPENINGS: list[tuple[tuple[str | int, ...], Any]] = [
    (("part",), "opening2"), (("part",), 3), (("part",), ...), (("epoch",), "a" * 31), (("epoch",), "A" * 32),
    (("epoch",), b"a" * 32), (("fingerprint",), "xyz"), (("fingerprint",), ""), (("fingerprint",), "a" * 129),
    (("num_tokens",), 0), (("num_tokens",), -1), (("num_tokens",), 1 << 60), (("num_tokens",), True),
    (("num_tokens",), 100.0), (("num_tokens",), "100"), (("num_tokens",), None), (("num_tokens",), ...),
    (("num_held_blocks",), 7), (("num_held_blocks",), -1), (("num_arena_blocks",), 0),
    (("num_arena_blocks",), 1 << 40), (("lease_ms",), -1), (("lease_ms",), 1 << 40), (("checksums",), 1),
    (("worker_id",), "w" * 129), (("worker_id",), 5), (("more",), 1), (("transports",), []),
    (("transports",), {str(index): {} for index in range(17)}), (("transports", "tcp"), 3),
    (("layout",), None), (("layout", "block_size"), 0), (("layout", "block_size"), 1025), (("layout", "version"), -1),
    (("layout", "more"), 1), (("layout", "components"), []), (("layout", "components"), {}),
    (("layout", "components", 0), 7), (("layout", "components", 0, "name"), "mtp.0"),
    (("layout", "components", 0, "kind"), "pagged"), (("layout", "components", 0, "width"), 0),
    (("layout", "components", 0, "dtype"), "int8"), (("layout", "components", 0, "first_position"), -1),
    (("layout", "components", 0, "window_slots"), 4), (("layout", "components", 1, "window_slots"), 0),
    (("layout", "components", 0, "more"), 0),
]


@pytest.mark.parametrize(("path", "value"), BAD_OPENINGS)
def test_a_bad_opening_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(InvalidArgument):
        unpack_part(changed(OPENING, *path, value=value))


BAD_CLOSINGS: list[tuple[tuple[str | int, ...], Any]] = [
    (("first_token_id",), -1), (("first_token_id",), 1 << 31), (("num_prompt_tokens",), 0),
    (("num_cached_tokens",), 101), (("finish_reason",), "because"), (("stop_reason",), "x" * 1001),
    (("logprobs", "logprob"), math.nan), (("logprobs", "logprob"), 1), (("logprobs", "top_ids"), [5]),
    (("logprobs", "top_ids"), [5, -9]), (("logprobs", "top_ids"), [5, True]),
    (("logprobs", "top_logprobs"), [0.0, "x"]),
    (("logprobs", "top_logprobs"), [0.0, math.nan]), (("logprobs", "top_ids"), list(range(21))), (("logprobs",), 4),
    (("logprobs", "more"), 4), (("hidden", "width"), 5), (("hidden", "width"), 0), (("hidden", "dtype"), "fp32"),
    (("hidden", "data"), b"1234567"), (("hidden", "data"), "12345678"), (("hidden", "more"), 1), (("hidden",), b""),
]


@pytest.mark.parametrize(("path", "value"), BAD_CLOSINGS)
def test_a_bad_closing_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(InvalidArgument):
        unpack_part(changed(CLOSING, *path, value=value))


@pytest.mark.parametrize("data", [
    b"", bytes(27), bytes(PIECE_RECORD.itemsize + 1), bytes((MAX_PIECES_IN_PART + 1) * PIECE_RECORD.itemsize), [], None,
])
def test_bad_records_are_refused(data: Any) -> None:
    with pytest.raises(InvalidArgument):
        unpack_part(msgpack.packb({"part": "pieces", "records": data}))


@pytest.mark.parametrize(("path", "value"), [
    (("transports",), ["x"] * 17), (("transports",), [3]), (("host_id",), 3), (("checksums",), None), (("more",), 1),
    (("layout", "components"), [{}] * 1025),
])
def test_a_bad_hello_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(InvalidArgument):
        unpack_hello(changed(HELLO, *path, value=value))


def test_what_is_not_msgpack_is_refused() -> None:
    for data in (
        b"", b"\xc1", b"\x81", b"[]", msgpack.packb([1]), msgpack.packb({1: 2}), msgpack.packb(None),
        pack_part(FAILED) + b"\x00", pack_part(FAILED)[:-1], b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 5000, msgpack.packb({"part": msgpack.Timestamp(1)}),
        b"\x81\xa4part\xa1\xff",
    ):
        with pytest.raises(InvalidArgument):
            unpack_part(data)


def test_a_part_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        unpack_part(bytes((1 << 20) + 1))


def test_an_error_names_the_field() -> None:
    with pytest.raises(InvalidArgument, match=r"components\[1\].*window_slots must be a whole number in \[1, "):
        unpack_part(changed(OPENING, "layout", "components", 1, "window_slots", value=0))
