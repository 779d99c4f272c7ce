"""Clients of the HTTP port that are slow on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pd_router import http_server
from pd_router.http_server import HttpServer

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
SHORT_S = 0.1


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Thinks for longer than a client may take to ask."""
    body = await Request(scope, receive).body()
    await asyncio.sleep(3 * SHORT_S)
    await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(http_server, "HEAD_S", SHORT_S)
    monkeypatch.setattr(http_server, "BODY_S", SHORT_S)
    server = HttpServer(echo, "127.0.0.1", 0)
    server.start()
    yield server.port
    await server.stop()


@pytest.mark.parametrize("drops", [[], [b"P", *[b"O"] * 1000], [HEAD, *[b"x"] * 999]], ids=["none", "head", "body"])
async def test_a_request_that_does_not_come_is_not_waited_for(port: int, drops: Iterable[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    hung_up = asyncio.create_task(_heard(reader))
    for drop in drops:
        if hung_up.done():
            break
        writer.write(drop)
        await asyncio.sleep(0.01)
    assert await hung_up == b""
    writer.close()


async def test_what_has_come_is_answered_however_long_that_takes(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(HEAD[:20])
        await asyncio.sleep(0.01)
        writer.write(HEAD[20:] + bytes(1000))
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(10) == b"1000 bytes"
    writer.close()


async def _heard(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""
