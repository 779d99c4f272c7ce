"""The HTTP door: OpenAI's completions and chat completions, models, health and metrics.

A request that is refused before its first token gets an HTTP status; one that fails after it, an error event in its
stream. A client that goes away ends its request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pd_engine.errors import Cancelled, ErrorCode, Internal, InvalidArgument, NotFound, PdRelayError
from pd_router.body_bounds import BodyBounds
from pd_router.dispatch import Dispatcher, RunningRequest
from pd_router.metrics import Metrics
from pd_router.model_info import ModelInfo
from pd_router.openai_body import ChatBody, CompletionBody, OpenAIBody, parse_body
from pd_router.openai_reply import ChatFormat, CompletionFormat, Json, ReplyFormat
from pd_router.registry import Registry
from pd_router.request import Preparer
from pd_router.stream import Chunk

log = logging.getLogger(__name__)

_ERROR_TYPES = {
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.RESOURCE_EXHAUSTED: "rate_limit_error",
}

T = TypeVar("T")


class HttpDoor:
    """Everything behind the routes. `app` is the ASGI application."""

    def __init__(
        self, *, dispatcher: Dispatcher, preparer: Preparer, model: ModelInfo, registry: Registry, metrics: Metrics
    ) -> None:
        self._dispatcher = dispatcher
        self._preparer = preparer
        self._model = model
        self._registry = registry
        self._metrics = metrics
        self.app = FastAPI(title="pd-relay", docs_url=None, redoc_url=None)
        self._add_routes()

    def _add_routes(self) -> None:
        app = self.app
        bodies: tuple[tuple[str, Any, type[CompletionBody] | type[ChatBody]], ...] = (
            ("/v1/completions", self.completions, CompletionBody),
            ("/v1/chat/completions", self.chat_completions, ChatBody),
        )
        for path, endpoint, body in bodies:
            schema = {"requestBody": {"content": {"application/json": {"schema": body.model_json_schema()}}}}
            app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=schema)
        for path, endpoint in (
            ("/v1/models", self.models),
            ("/health", self.health),
            ("/live", self.live),
            ("/metrics", self.metrics),
        ):
            app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        app.add_exception_handler(PdRelayError, _on_error)
        app.add_exception_handler(HTTPException, _on_http_error)
        app.add_exception_handler(404, _on_http_error)
        app.add_exception_handler(405, _on_http_error)
        app.add_exception_handler(Exception, _on_bug)

    async def completions(self, http: HttpRequest) -> Response:
        body = parse_body(CompletionBody, await self._read(http))
        return await self._answer(http, body, CompletionFormat)

    async def chat_completions(self, http: HttpRequest) -> Response:
        body = parse_body(ChatBody, await self._read(http))
        return await self._answer(http, body, ChatFormat)

    async def models(self) -> Response:
        limits = self._model.limits(self._registry)
        entry = {
            "id": self._model.served_name,
            "object": "model",
            "created": 0,
            "owned_by": "pd-relay",
            "max_model_len": limits.max_context_length,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self) -> Response:
        """200 while both pools have a ready worker."""
        serving = self._registry.serving
        return JSONResponse({"status": "ok" if serving else "no workers"}, status_code=200 if serving else 503)

    async def live(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(
        self, http: HttpRequest, body: CompletionBody | ChatBody, format_type: type[ReplyFormat]
    ) -> Response:
        self._check_model(body)
        self._dispatcher.admit()
        request = await self._preparer.prepare(body.request())
        replies = format_type(
            request,
            self._model.tokenizer,
            model=self._model.served_name,
            with_token_ids=bool(body.return_token_ids),
        )
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(self._dispatcher.run(request))
            chunks = running.chunks()
            if not body.stream:
                await _unless_gone(http, _drain(chunks))
                return JSONResponse(replies.whole(running.result()))
            first = await _unless_gone(http, anext(chunks, None))
            if first is None:
                running.result()  # raises, unless it was aborted
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            events = _events(running, chunks, first, replies, include_usage=include_usage)
            return EventStream(events, stack.pop_all())

    async def _read(self, http: HttpRequest) -> bytes:
        """Raises:
        InvalidArgument: the body is larger than any prompt needs.
        """
        bounds = BodyBounds.of_context(
            max_context_length=self._model.limits(self._registry).max_context_length,
            max_token_chars=self._model.tokenizer.max_token_chars,
        )
        parts, size = [], 0
        async for part in http.stream():
            size += len(part)
            bounds.check_num_bytes(size)
            parts.append(part)
        data = b"".join(parts)
        bounds.check_num_values(data)
        return data

    def _check_model(self, body: OpenAIBody) -> None:
        if body.model not in (None, self._model.served_name, str(self._model.path)):
            raise NotFound(f"the model {body.model[:64]!r} is not served here, only {self._model.served_name!r}")


async def _events(
    running: RunningRequest,
    chunks: AsyncIterator[Chunk],
    first: Chunk | None,
    replies: ReplyFormat,
    *,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    for reply in replies.opening():
        yield _event(reply)
    if first is not None and (reply_or_none := replies.chunk(first)) is not None:
        yield _event(reply_or_none)
    async for chunk in chunks:
        if (reply_or_none := replies.chunk(chunk)) is not None:
            yield _event(reply_or_none)
    try:
        closing = replies.closing(running.result(), include_usage=include_usage)
    except PdRelayError as error:
        yield _event(error_body(error))
    else:
        for reply in closing:
            yield _event(reply)
    yield b"data: [DONE]\n\n"


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


def error_body(error: PdRelayError) -> Json:
    """OpenAI's shape; `code` is `pd_engine.errors.ErrorCode`."""
    kind = "invalid_request_error" if 400 <= error.http_status < 499 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.code, kind),
            "param": None,
            "code": error.code.value,
        }
    }


async def _drain(chunks: AsyncIterator[Chunk]) -> None:
    async for _ in chunks:
        pass


async def _unless_gone(http: HttpRequest, work: Awaitable[T]) -> T:
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


def _error_response(error: PdRelayError) -> Response:
    headers = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, PdRelayError)
    return _error_response(error)


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException | Exception)
    status = getattr(error, "status_code", 404)
    message = f"there is no {http.method} {http.url.path[:200]} here"
    body = error_body(NotFound(message) if status in (404, 405) else InvalidArgument(str(getattr(error, "detail", ""))))
    return JSONResponse(body, status_code=status)


async def _on_bug(http: HttpRequest, error: Exception) -> Response:
    incident = secrets.token_hex(4)
    log.error("incident %s in %s", incident, http.url.path, exc_info=error)
    return _error_response(Internal(f"internal error (incident {incident}; the server's log has the details)"))


Handler = Callable[[HttpRequest, Exception], Awaitable[Response]]
