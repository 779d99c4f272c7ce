"""Clients of the HTTP port that are slow on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from pd_router import http_server
from pd_router.http_server import HttpServer
from support.leaks import until

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
SHORT_S = 0.1


class Echo:
    """Says how much has come, when it may."""

    def __init__(self) -> None:
        self.has_all = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        self.has_all.set()
        await self.may_answer.wait()
        await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def server(echo: Echo) -> AsyncIterator[HttpServer]:
    server = HttpServer(echo, "127.0.0.1", 0)
    server.start()
    yield server
    await server.stop()


@pytest.mark.parametrize("drops", [[], [b"P", *[b"O"] * 1000], [HEAD, *[b"x"] * 999]], ids=["none", "head", "body"])
async def test_a_request_that_does_not_come_is_not_waited_for(
    server: HttpServer, drops: Iterable[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", SHORT_S)
    monkeypatch.setattr(http_server, "BODY_S", SHORT_S)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    hung_up = asyncio.create_task(_heard(reader))
    for drop in drops:
        if hung_up.done():
            break
        writer.write(drop)
        await asyncio.sleep(0.01)
    assert await hung_up == b""
    writer.close()


async def test_what_has_come_is_answered_however_long_that_takes(server: HttpServer, echo: Echo) -> None:
    """Once all of a request is there, nothing is waited for that could run out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(2):
        echo.has_all.clear()
        echo.may_answer.clear()
        writer.write(HEAD[:20])
        await until(lambda: _waits(server))
        writer.write(HEAD[20:] + bytes(1000))
        await echo.has_all.wait()
        assert not _waits(server)
        echo.may_answer.set()
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(10) == b"1000 bytes"
    writer.close()


def _waits(server: HttpServer) -> bool:
    """Whether a connection is hung up on unless more comes soon."""
    connections: set[Any] = server._server.server_state.connections
    return any(connection._deadline is not None for connection in connections)


async def _heard(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""
