"""What a client gets while its request runs: server-sent events; and how it is noticed that a client has gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pd_engine.errors import Cancelled, PdRelayError
from pd_router.openai_errors import error_body
from pd_router.openai_reply import Json, ReplyFormat
from pd_router.running import RunningRequest, Update

T = TypeVar("T")


async def reply_events(
    running: RunningRequest, first: Update, updates: AsyncIterator[Update], replies: ReplyFormat
) -> AsyncIterator[bytes]:
    for reply in replies.opening():
        yield _event(reply)
    try:
        for event in _update_events(running, first, replies):
            yield event
        async for update in updates:
            for event in _update_events(running, update, replies):
                yield event
        for reply in replies.closing(running.results()):
            yield _event(reply)
    except PdRelayError as error:
        yield _event(error_body(error))
    yield b"data: [DONE]\n\n"


def _update_events(running: RunningRequest, update: Update, replies: ReplyFormat) -> Iterator[bytes]:
    """Raises:
    PdRelayError: the choice was rejected or has failed.
    """
    choice = running.choices[update.choice]
    if update.chunk is not None:
        begun_s = time.perf_counter()
        reply = replies.chunk(update.choice, update.chunk, choice.journey.stream.tokens)
        event = _event(reply) if reply else None
        choice.streaming.note(time.perf_counter() - begun_s)
        if event is not None:
            yield event
    if update.ended:
        yield _event(replies.final(running.result(update.choice)))


class EventStream(Response):
    """Server-sent events; what `stack` holds is let go of when they are over or the client is gone."""

    def __init__(self, events: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_wait_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._stack.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def drain(running: RunningRequest, updates: AsyncIterator[Update]) -> None:
    """Until all choices have ended.

    Raises:
        PdRelayError: one was rejected or has failed; the others may be running.
    """
    async for update in updates:
        if update.ended:
            running.result(update.choice)


async def unless_gone(http: HttpRequest, work: Awaitable[T]) -> T:
    """Raises:
    Cancelled: the client went away first.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_wait_gone(http.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client went away")
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(reply: Json) -> bytes:
    return b"data: " + json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
