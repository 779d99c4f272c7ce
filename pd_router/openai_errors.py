"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import logging
import math
import secrets

from fastapi import FastAPI
from fastapi.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from pd_engine.errors import ErrorCode, Internal, InvalidArgument, NotFound, PdRelayError
from pd_router.openai_reply import Json

log = logging.getLogger(__name__)

_ERROR_TYPES = {
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.RESOURCE_EXHAUSTED: "rate_limit_error",
}


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(PdRelayError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(404, _on_http_error)
    app.add_exception_handler(405, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


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


def error_response(error: PdRelayError) -> Response:
    headers = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, PdRelayError)
    return error_response(error)


async def _on_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException | Exception)
    status = getattr(error, "status_code", 404)
    message = f"there is no {http.method} {http.url.path[:200]} here"
    body = error_body(NotFound(message) if status in (404, 405) else InvalidArgument(str(getattr(error, "detail", ""))))
    return JSONResponse(body, status_code=status, headers=getattr(error, "headers", None))


async def _on_bug(http: HttpRequest, error: Exception) -> Response:
    incident = secrets.token_hex(4)
    log.error("incident %s in %s", incident, http.url.path, exc_info=error)
    return error_response(Internal(f"internal error (incident {incident}; the server's log has the details)"))
