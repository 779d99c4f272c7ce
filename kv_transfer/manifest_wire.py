"""Manifests as bytes, and back with every field checked. A hostile part is refused, never acted on.

What one part can tell by itself is checked here; what depends on the handoff (ids in range, overlaps, counts of
slots) is checked by `pieces.PieceTable.announce`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from kv_transfer.journey import is_hex_id
from kv_transfer.layout_wire import MAX_NAME_CHARS, MAX_TOKENS, MAX_WIDTH, layout_map, read_dtype, read_layout
from kv_transfer.manifest import (
    PIECE_RECORD,
    Closing,
    Failed,
    Hello,
    HiddenState,
    Opening,
    Part,
    Pieces,
)
from kv_transfer.wire import Fields, pack, unpack
from pd_engine.cache.layout import DTYPE_BYTES
from pd_engine.errors import ErrorCode, InvalidArgument
from pd_engine.sampling.params import MAX_LOGPROBS
from pd_engine.sequence import FinishReason, TokenLogprobs

MAX_PIECES_IN_PART = 16_384  # 448 KiB
MAX_HELLO_BYTES = 256 * 1024
MAX_ARENA_BLOCKS = 1 << 31
MAX_LEASE_MS = 3_600_000
MAX_TOKEN_ID = (1 << 31) - 1
MAX_MESSAGE_CHARS = 1_000
MAX_TRANSPORTS = 16
_FINGERPRINT = re.compile(r"[0-9a-f]{1,128}\Z")


def pack_hello(hello: Hello) -> bytes:
    return pack({
        "worker_id": hello.worker_id, "fingerprint": hello.fingerprint, "layout": layout_map(hello.layout),
        "host_id": hello.host_id, "transports": list(hello.transports), "checksums": hello.checksums,
        "lease_ms": hello.lease_ms,
    })


def unpack_hello(data: bytes) -> Hello:
    """Raises: InvalidArgument."""
    fields = unpack(data, "hello", max_bytes=MAX_HELLO_BYTES)
    hello = Hello(
        worker_id=fields.text("worker_id", MAX_NAME_CHARS), fingerprint=_fingerprint(fields),
        layout=read_layout(fields.fields("layout")), host_id=fields.text("host_id", MAX_NAME_CHARS),
        transports=_names(fields, "transports"), checksums=fields.boolean("checksums"),
        lease_ms=fields.integer("lease_ms", 0, MAX_LEASE_MS),
    )
    fields.done()
    return hello


def pack_part(part: Part) -> bytes:
    match part:
        case Opening():
            return pack(_opening_map(part))
        case Pieces():
            assert 1 <= len(part.records) <= MAX_PIECES_IN_PART and part.records.dtype == PIECE_RECORD
            return pack({"part": "pieces", "records": part.records.tobytes()})
        case Closing():
            return pack(_closing_map(part))
        case Failed():
            message = part.message[:MAX_MESSAGE_CHARS]
            return pack({"part": "failed", "code": part.code.value, "message": message})


def unpack_part(data: bytes) -> Part:
    """Raises: InvalidArgument."""
    fields = unpack(data, "manifest")
    kind = fields.text("part", 16)
    if kind not in _READERS:
        raise InvalidArgument(f"manifest: part must be one of {', '.join(_READERS)}, got {kind!r}")
    part = _READERS[kind](fields)
    fields.done()
    return part


def _opening_map(part: Opening) -> dict[str, Any]:
    return {
        "part": "opening", "worker_id": part.worker_id, "epoch": part.epoch, "fingerprint": part.fingerprint,
        "layout": layout_map(part.layout), "host_id": part.host_id, "num_tokens": part.num_tokens,
        "num_held_blocks": part.num_held_blocks, "num_arena_blocks": part.num_arena_blocks,
        "lease_ms": part.lease_ms, "checksums": part.checksums,
        "transports": {name: dict(metadata) for name, metadata in part.transports.items()},
    }


def _read_opening(fields: Fields) -> Opening:
    epoch = fields.text("epoch", 32)
    if not is_hex_id(epoch):
        raise InvalidArgument(f"manifest: epoch must be 32 hexadecimal digits, got {epoch!r}")
    layout = read_layout(fields.fields("layout"))
    num_tokens = fields.integer("num_tokens", 1, MAX_TOKENS)
    return Opening(
        worker_id=fields.text("worker_id", MAX_NAME_CHARS), epoch=epoch, fingerprint=_fingerprint(fields),
        layout=layout, host_id=fields.text("host_id", MAX_NAME_CHARS), num_tokens=num_tokens,
        num_held_blocks=fields.integer("num_held_blocks", 0, num_tokens // layout.block_size),
        num_arena_blocks=fields.integer("num_arena_blocks", 1, MAX_ARENA_BLOCKS),
        lease_ms=fields.integer("lease_ms", 0, MAX_LEASE_MS), checksums=fields.boolean("checksums"),
        transports=_transports(fields.fields("transports")),
    )


def _read_pieces(fields: Fields) -> Pieces:
    data = fields.octets("records", MAX_PIECES_IN_PART * PIECE_RECORD.itemsize)
    if len(data) == 0 or len(data) % PIECE_RECORD.itemsize:
        raise InvalidArgument(f"manifest: records must be n x {PIECE_RECORD.itemsize} bytes, n >= 1, got {len(data)}")
    return Pieces(np.frombuffer(data, dtype=PIECE_RECORD))


def _closing_map(part: Closing) -> dict[str, Any]:
    hidden = part.hidden
    logprobs = part.logprobs
    return {
        "part": "closing", "first_token_id": part.first_token_id, "num_prompt_tokens": part.num_prompt_tokens,
        "num_cached_tokens": part.num_cached_tokens,
        "logprobs": None if logprobs is None else {
            "logprob": float(logprobs.logprob),
            "top_ids": [token_id for token_id, _ in logprobs.top],
            "top_logprobs": [float(value) for _, value in logprobs.top],
        },
        "finish_reason": part.finish_reason.value if part.finish_reason else "", "stop_reason": part.stop_reason,
        "hidden": None if hidden is None else {"data": hidden.data, "dtype": hidden.dtype, "width": hidden.width},
    }


def _read_closing(fields: Fields) -> Closing:
    num_prompt_tokens = fields.integer("num_prompt_tokens", 1, MAX_TOKENS)
    return Closing(
        first_token_id=fields.optional_integer("first_token_id", 0, MAX_TOKEN_ID),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=fields.integer("num_cached_tokens", 0, num_prompt_tokens),
        logprobs=_read_logprobs(fields.optional_fields("logprobs")),
        finish_reason=_finish_reason(fields.text("finish_reason", 16)),
        stop_reason=fields.text("stop_reason", MAX_MESSAGE_CHARS),
        hidden=_read_hidden(fields.optional_fields("hidden")),
    )


def _read_logprobs(fields: Fields | None) -> TokenLogprobs | None:
    if fields is None:
        return None
    logprob = fields.number("logprob")
    ids, values = fields.items("top_ids", MAX_LOGPROBS), fields.items("top_logprobs", MAX_LOGPROBS)
    fields.done()
    if len(ids) != len(values):
        raise InvalidArgument(f"{fields.where}: {len(ids)} top_ids and {len(values)} top_logprobs")
    if not all(type(token_id) is int and 0 <= token_id <= MAX_TOKEN_ID for token_id in ids):
        raise InvalidArgument(f"{fields.where}: top_ids must be token ids")
    if not all(type(value) is float and value == value for value in values):
        raise InvalidArgument(f"{fields.where}: top_logprobs must be numbers")
    return TokenLogprobs(logprob=logprob, top=tuple(zip(ids, values, strict=True)))


def _read_hidden(fields: Fields | None) -> HiddenState | None:
    if fields is None:
        return None
    dtype, width = read_dtype(fields), fields.integer("width", 1, MAX_WIDTH)
    data = fields.octets("data", width * DTYPE_BYTES[dtype])
    fields.done()
    if len(data) != width * DTYPE_BYTES[dtype]:
        raise InvalidArgument(f"{fields.where}: {len(data)} bytes of data are not {width} numbers of {dtype}")
    return HiddenState(data=data, dtype=dtype, width=width)


def _read_failed(fields: Fields) -> Failed:
    code = fields.text("code", 32)
    if code not in {known.value for known in ErrorCode}:
        raise InvalidArgument(f"manifest: code must be an error code, got {code!r}")
    return Failed(code=ErrorCode(code), message=fields.text("message", MAX_MESSAGE_CHARS))


_READERS: dict[str, Callable[[Fields], Part]] = {
    "opening": _read_opening, "pieces": _read_pieces, "closing": _read_closing, "failed": _read_failed,
}


def _transports(fields: Fields) -> dict[str, dict[str, Any]]:
    names = fields.names()
    if len(names) > MAX_TRANSPORTS:
        raise InvalidArgument(f"{fields.where}: at most {MAX_TRANSPORTS} are allowed, got {len(names)}")
    transports = {}
    for name in names:
        metadata = fields.fields(name)
        transports[name] = {key: metadata.raw(key) for key in metadata.names()}
    return transports


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    items = fields.items(name, MAX_TRANSPORTS)
    if not all(type(item) is str and len(item) <= MAX_NAME_CHARS for item in items):
        raise InvalidArgument(f"{fields.where}: {name} must be short texts")
    return tuple(items)


def _fingerprint(fields: Fields) -> str:
    fingerprint = fields.text("fingerprint", 128)
    if not _FINGERPRINT.match(fingerprint):
        raise InvalidArgument(f"{fields.where}: fingerprint must be hexadecimal, got {fingerprint[:64]!r}")
    return fingerprint


def _finish_reason(text: str) -> FinishReason | None:
    if text and text not in {reason.value for reason in FinishReason}:
        raise InvalidArgument(f"manifest: finish_reason must be empty or a finish reason, got {text!r}")
    return FinishReason(text) if text else None
