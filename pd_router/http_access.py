"""Lets in who has a key, before anything of a request is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from pd_engine.errors import Unauthenticated
from pd_router.callers import Caller, Callers
from pd_router.openai_errors import error_response

OPEN_PATHS = frozenset({"/health", "/live", "/ui"})  # the page asks for a key itself


class HttpAccess:
    """An ASGI application around another one, whose requests have a caller from here on (`caller_of`)."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                caller = self._callers.of(Headers(scope=scope).get("authorization"))
            except Unauthenticated as error:
                response = error_response(error)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(http: HttpRequest) -> Caller:
    caller = http.state.caller
    assert isinstance(caller, Caller), caller
    return caller
