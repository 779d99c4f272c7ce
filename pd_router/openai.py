"""The HTTP door: OpenAI's completions and chat completions, models, tokenization, health and metrics.

A request that is refused before its first token gets an HTTP status; one that fails after it, an error event in its
stream. A client that goes away ends its request.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pd_engine.errors import Cancelled, NotFound
from pd_engine.text.defaults import check_ids
from pd_router.body_bounds import BodyBounds
from pd_router.callers import Callers
from pd_router.dispatch import Dispatcher
from pd_router.http_access import HttpAccess, caller_of
from pd_router.live import LivePast, LiveView
from pd_router.metrics import Metrics
from pd_router.model_info import ModelInfo
from pd_router.openai_body import ChatBody, CompletionBody, StreamOptions, Strict, parse_body
from pd_router.openai_errors import add_error_handlers
from pd_router.openai_reply import ChatFormat, CompletionFormat, Json, ReplyFormat
from pd_router.openai_stream import EventStream, drain, reply_events, unless_gone
from pd_router.openapi import Responses, answers, answers_of_requests, path_parameter, request_body
from pd_router.registry import Registry
from pd_router.request import Preparer
from pd_router.tokenize_body import DetokenizeBody, TokenizeBody
from pd_router.trace_parent import TraceParent

JSON, EVENTS = "application/json", "text/event-stream"
UI_PAGE = Path(__file__).parent / "ui" / "index.html"
UI_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
}


class HttpDoor:
    """Everything behind the routes. `app` is the ASGI application."""

    def __init__(
        self, *, dispatcher: Dispatcher, preparer: Preparer, model: ModelInfo, registry: Registry, metrics: Metrics,
        callers: Callers,
    ) -> None:
        self._dispatcher = dispatcher
        self._preparer = preparer
        self._model = model
        self._registry = registry
        self._metrics = metrics
        self._live = LiveView(
            registry, model.served_name, lambda: dispatcher.num_running, lambda: dispatcher.num_waiting,
            metrics,
        )
        self.past = LivePast(self._live)
        self._routes = FastAPI(title="pd-relay", docs_url=None, redoc_url=None)
        self._add_routes()
        self.app = HttpAccess(self._routes, callers)

    def _add_routes(self) -> None:
        app = self._routes
        bodies: tuple[tuple[str, Any, type[Strict], Responses], ...] = (
            ("/v1/completions", self.completions, CompletionBody, answers_of_requests(JSON, EVENTS)),
            ("/v1/chat/completions", self.chat_completions, ChatBody, answers_of_requests(JSON, EVENTS)),
            ("/tokenize", self.tokenize, TokenizeBody, answers(JSON, status_codes=(400, 404))),
            ("/detokenize", self.detokenize, DetokenizeBody, answers(JSON, status_codes=(400, 404))),
        )
        for path, endpoint, body, responses in bodies:
            app.add_api_route(
                path, endpoint, methods=["POST"], response_class=Response, responses=responses,
                openapi_extra=request_body(body, self._model.config.vocab_size),
            )
        unhealthy = {"description": "No worker can serve, or the router stops.", "content": {JSON: {}}}
        gets: tuple[tuple[str, Any, Responses], ...] = (
            ("/v1/models", self.models, answers(JSON)),
            ("/health", self.health, {**answers(JSON, needs_key=False), 503: unhealthy}),
            ("/live", self.live, answers(JSON, needs_key=False)),
            ("/metrics", self.metrics, answers("text/plain")),
            ("/ui", self.ui, answers("text/html", needs_key=False)),
            ("/ui/data", self.ui_data, answers(JSON)),
            ("/ui/past", self.ui_past, answers(JSON)),
        )
        for path, endpoint, responses in gets:
            app.add_api_route(path, endpoint, methods=["GET"], response_class=Response, responses=responses)
        app.add_api_route(
            "/v1/models/{name:path}", self.model, methods=["GET"], response_class=Response,
            responses=answers(JSON, status_codes=(404,)), openapi_extra=path_parameter("name"),
        )
        add_error_handlers(app)

    async def completions(self, http: HttpRequest) -> Response:
        body = parse_body(CompletionBody, await self._read(http))
        return await self._answer(http, body, CompletionFormat)

    async def chat_completions(self, http: HttpRequest) -> Response:
        body = parse_body(ChatBody, await self._read(http))
        return await self._answer(http, body, ChatFormat)

    async def tokenize(self, http: HttpRequest) -> Response:
        body = parse_body(TokenizeBody, await self._read(http))
        self._check_model(body.model)
        prompt, is_chat = body.to_tokenize()
        ids = await self._preparer.tokenize(prompt, is_chat=is_chat)
        decode = self._model.tokenizer.decode
        reply = {
            "count": len(ids),
            "max_model_len": self._model.limits(self._registry).max_context_length,
            "tokens": ids,
            "token_strs": [decode([token_id]) for token_id in ids] if body.return_token_strs else None,
        }
        return JSONResponse(reply)

    async def detokenize(self, http: HttpRequest) -> Response:
        body = parse_body(DetokenizeBody, await self._read(http))
        self._check_model(body.model)
        check_ids("tokens", body.tokens, self._model.config.vocab_size)
        return JSONResponse({"prompt": self._model.tokenizer.decode(body.tokens)})

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def model(self, http: HttpRequest) -> Response:
        self._check_model(http.path_params["name"])
        return JSONResponse(self._model_entry())

    def _model_entry(self) -> Json:
        limits = self._model.limits(self._registry)
        return {
            "id": self._model.served_name,
            "object": "model",
            "created": 0,
            "owned_by": "pd-relay",
            "max_model_len": limits.max_context_length,
        }

    async def health(self) -> Response:
        """200 while requests find who computes their prompts and who continues them, and the router takes some."""
        if self._dispatcher.is_stopping:
            return JSONResponse({"status": "stopping"}, status_code=503)
        serving = self._registry.serving
        return JSONResponse({"status": "ok" if serving else "no workers"}, status_code=200 if serving else 503)

    async def live(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def ui(self) -> Response:
        """The page; all that it shows comes from `ui_data`."""
        return Response(UI_PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=UI_HEADERS)

    async def ui_data(self) -> Response:
        return JSONResponse(self._live.document(), headers={"cache-control": "no-store"})

    async def ui_past(self) -> Response:
        return Response(await self.past.text(), media_type=JSON, headers={"cache-control": "no-store"})

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(
        self, http: HttpRequest, body: CompletionBody | ChatBody, format_type: type[ReplyFormat]
    ) -> Response:
        self._check_model(body.model)
        caller = caller_of(http)
        self._dispatcher.admit(caller, body.request_id or "")
        request = await self._preparer.prepare(body.request(), caller)
        options = body.stream_options or StreamOptions()
        replies = format_type(
            request,
            self._model.tokenizer,
            model=self._model.served_name,
            with_token_ids=bool(body.return_token_ids),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
        )
        async with AsyncExitStack() as stack:
            parent = TraceParent.parse(http.headers.get("traceparent"))
            running = await stack.enter_async_context(self._dispatcher.run(request, caller, parent))
            updates = running.updates(request)
            if not body.stream:
                await unless_gone(http, drain(running, updates))
                return JSONResponse(replies.whole(running.results()))
            first = await unless_gone(http, anext(updates))
            if first.chunk is None:
                running.result(first.choice)  # raises, unless it was aborted
            return EventStream(reply_events(running, first, updates, replies), stack.pop_all())

    async def _read(self, http: HttpRequest) -> bytes:
        """Raises:
        InvalidArgument: the body is larger than any prompt needs.
        Cancelled: the client went away before it was there.
        """
        bounds = BodyBounds.of_context(
            max_context_length=self._model.limits(self._registry).max_context_length,
            max_token_chars=self._model.tokenizer.max_token_chars,
        )
        parts, size = [], 0
        try:
            async for part in http.stream():
                size += len(part)
                bounds.check_num_bytes(size)
                parts.append(part)
        except ClientDisconnect:
            raise Cancelled("the client went away") from None
        data = b"".join(parts)
        bounds.check_num_values(data)
        return data

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in (self._model.served_name, str(self._model.path)):
            raise NotFound(f"the model {model[:64]!r} is not served here, only {self._model.served_name!r}")
