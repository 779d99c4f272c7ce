"""Requests over OpenAI's completions API, streamed, by HTTP/1.1 on plain sockets: one connection a request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import resource
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pd_engine.errors import InvalidArgument, PdRelayError, ResourceExhausted, Unavailable
from pd_ops.bench.serve.record import Recording
from pd_ops.bench.serve.sender import Sampling

MAX_LINE_BYTES = 16 * 2**20
MAX_ERROR_BYTES = 65_536
CONNECT_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
OTHER_FILES = 256  # that a process has open beside its connections, at most
_REFUSED = (429,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Attributes:
    path: before /v1, without a slash at its end.
    """

    host: str
    port: int
    path: str
    is_tls: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        """Raises:
        InvalidArgument: it is no http:// or https:// address.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidArgument(f"--url must be http://HOST:PORT, got {url[:80]!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidArgument(f"--url must be http://HOST:PORT, got {url[:80]!r}")
        is_tls = parts.scheme == "https"
        return cls(host=parts.hostname, port=port or (443 if is_tls else 80), is_tls=is_tls, api_key=api_key,
                   path=parts.path.rstrip("/").removesuffix("/v1"))


class HttpSender:
    """Attributes:
    model: the served model's name.
    asks_token_ids: the endpoint is asked for token ids beside text (vLLM and pd-relay know that); without them a chunk
        with text counts as one token.
    """

    def __init__(self, endpoint: Endpoint, model: str, sampling: Sampling, *, asks_token_ids: bool = True) -> None:
        self._endpoint = endpoint
        self._model = model
        self._sampling = sampling
        self._asks_token_ids = asks_token_ids

    async def send(self, token_ids: Sequence[int], recording: Recording, now: Callable[[], float]) -> None:
        body = self._body(token_ids, recording)
        async with _call(self._endpoint, "POST", "/v1/completions", body) as (status, lines):
            if status != 200:
                raise await _refusal(status, lines)
            is_done = False
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    is_done = True
                    break
                _take(_event(data), recording, now())
            if not is_done:
                raise Unavailable("the stream ended without [DONE]")

    def _body(self, token_ids: Sequence[int], recording: Recording) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model, "prompt": list(token_ids), "max_tokens": recording.asked_tokens, "stream": True,
            "temperature": self._sampling.temperature, "seed": self._sampling.seed + recording.number,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }
        if self._asks_token_ids:
            body["return_token_ids"] = True
        if self._sampling.speculate is not None:
            body["speculate"] = self._sampling.speculate
        return body


async def get_json(endpoint: Endpoint, path: str) -> Any:
    """Raises:
    Unavailable: nobody answers, or with an error, or not in JSON.
    """
    name = f"{endpoint.host}:{endpoint.port}{path}"
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S), _call(endpoint, "GET", path, None) as (status, lines):
            text = b"\n".join([line async for line in lines])
    except TimeoutError:
        raise Unavailable(f"{name}: no answer in {CALL_TIMEOUT_S:g} s") from None
    try:
        if status != 200:
            raise ValueError(f"status {status}")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{name}: {error}") from None


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"an event is not JSON: {error}") from None
    if not isinstance(event, dict):
        raise Unavailable(f"an event is no JSON object: {data[:80]!r}")
    if told := event.get("error"):
        message = told.get("message") if isinstance(told, dict) else told
        raise Unavailable(f"in the stream: {str(message)[:300]}")
    return event


def _take(event: dict[str, Any], recording: Recording, at_s: float) -> None:
    """Raises:
    Unavailable: it is of no known shape.
    """
    try:
        for choice in event.get("choices") or ():
            token_ids = choice.get("token_ids")
            count = len(token_ids) if token_ids is not None else int(bool(choice.get("text")))
            if count:
                recording.arrivals.append((at_s, count))
            if choice.get("finish_reason"):
                recording.details["finish_reason"] = str(choice["finish_reason"])
        usage = event.get("usage")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            told = usage.get("completion_tokens")
            details = usage.get("completion_tokens_details") or {}
            accepted, rejected = (details.get(f"{name}_prediction_tokens") for name in ("accepted", "rejected"))
            recording.details["num_cached_tokens"] = None if cached is None else int(cached)
            recording.details["num_told_tokens"] = None if told is None else int(told)
            if accepted is not None and rejected is not None:
                recording.details |= {"num_accepted": int(accepted), "num_drafted": int(accepted) + int(rejected)}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise Unavailable(f"an event is of another shape: {error}") from None


async def _refusal(status: int, lines: AsyncIterator[bytes]) -> PdRelayError:
    text = b""
    async for line in lines:
        text += line
        if len(text) > MAX_ERROR_BYTES:
            break
    message = f"HTTP {status}: {text[:300].decode('utf-8', 'replace')}"
    return ResourceExhausted(message) if status in _REFUSED else Unavailable(message)


@asynccontextmanager
async def _call(endpoint: Endpoint, method: str, path: str, body: Any
                ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """The status, and the body's lines as they come. Leaving closes the connection.

    Raises:
        Unavailable: the connection failed, or what came is no HTTP.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, limit=MAX_LINE_BYTES,
                ssl=_tls() if endpoint.is_tls else None,
            )
        writer.write(_head_and_body(endpoint, method, path, body))
        await writer.drain()
        status, is_chunked = await _read_head(reader)
        yield status, _lines(_chunks(reader) if is_chunked else _rest(reader))
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ValueError) as error:
        name = f"{endpoint.host}:{endpoint.port}"
        raise Unavailable(f"{name}: {type(error).__name__}: {str(error)[:200]}") from None
    finally:
        if writer is not None:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@functools.cache
def _tls() -> ssl.SSLContext:
    """Once: to read the certificates takes longer than most tokens, in which nothing else would be received."""
    return ssl.create_default_context()


def room_for_connections(most: int) -> int:
    """How many of so many connections at once this process may have, once it has asked for more files: what a limit of
    its own refuses would look like failures of the endpoint."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        return most
    wanted = min(hard, most + OTHER_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, min(most, soft - OTHER_FILES))


def _head_and_body(endpoint: Endpoint, method: str, path: str, body: Any) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    fields = {
        "Host": f"{endpoint.host}:{endpoint.port}", "Connection": "close", "Accept": "*/*",
        "Content-Type": "application/json", "Content-Length": str(len(data)),
    }
    if endpoint.api_key:
        fields["Authorization"] = f"Bearer {endpoint.api_key}"
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {endpoint.path}{path} HTTP/1.1\r\n{head}\r\n".encode() + data


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the body comes in chunks)."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, rest = head[0].partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"no HTTP/1.1 answer: {head[0][:80]!r}")
    is_chunked = any(line.lower().replace(" ", "") == "transfer-encoding:chunked" for line in head[1:])
    return int(rest[:3]), is_chunked


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        if size > MAX_LINE_BYTES:
            raise ValueError(f"a chunk of {size} bytes")
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(65_536):
        yield data


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Without their ends; whole ones as soon as they are there."""
    left = b""
    async for part in parts:
        *lines, left = (left + part).split(b"\n")
        if len(left) > MAX_LINE_BYTES:
            raise ValueError("a line without an end")
        for line in lines:
            yield line.rstrip(b"\r")
    if left:
        yield left
