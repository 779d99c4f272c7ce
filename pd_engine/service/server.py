"""Builds a grpc.aio server: keepalive, the cluster secret on every call, and typed errors as statuses.

A servicer raises `PdRelayError`; the caller sees its status, its message, its code and its retry hint. Anything
else that escapes a servicer is logged here with an incident number, and the caller sees that number only.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from pd_engine.errors import Internal, InvalidArgument, PdRelayError, Unauthenticated
from pd_engine.service.options import MAX_CONNECTIONS, SERVER_OPTIONS
from pd_engine.service.secret import metadata_has_secret

CODE_METADATA_KEY = "pd-relay-code"
RETRY_AFTER_METADATA_KEY = "pd-relay-retry-after-ms"
MAX_DETAIL_CHARS = 2_000  # details travel as a header, percent-encoded

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class RequestBounds(Protocol):
    """What a request may be. `max_bytes`: of any."""

    @property
    def max_bytes(self) -> int: ...

    def check(self, path: str, data: bytes) -> None:
        """Of the request of one call, by the call's path, before it is parsed.

        Raises:
            InvalidArgument: it is not to be parsed.
        """


def build_server(
    *, secret: str | None, bounds: RequestBounds | None = None, shares_port: bool = False,
    authorize: Callable[[str, Any], None] | None = None,
) -> grpc.aio.Server:
    """A server without services and ports, of the event loop that runs.

    Args:
        secret: every call must carry it; None for a public door, which has its own way to authenticate.
        bounds: of requests; None: those that gRPC's options set.
        shares_port: whether another process of this user that says so too may listen on the same port.
        authorize: called with each call's path and metadata before its request is read; raises `Unauthenticated`.
    """
    options = dict(SERVER_OPTIONS)
    if shares_port:
        options["grpc.so_reuseport"] = 1
    if secret is not None:
        options["grpc.max_allowed_incoming_connections"] = MAX_CONNECTIONS
    if bounds is not None:
        options["grpc.max_receive_message_length"] = bounds.max_bytes
    return grpc.aio.server(interceptors=[BoundaryInterceptor(secret, bounds, authorize)], options=list(options.items()))


def host_port(host: str, port: int) -> str:
    """"host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Listens on host:port (0: any free port) and returns the port; in plain text without credentials.

    Raises:
        InvalidArgument: the address cannot be bound, such as one that is in use.
    """
    try:
        address = host_port(host, port)
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise InvalidArgument(f"cannot listen on {host}:{port}: {error}") from None
    if bound == 0:
        raise InvalidArgument(f"cannot listen on {host}:{port}")
    return bound


class Health:
    """The standard health service. Everything is NOT_SERVING until `set_serving(True)`."""

    def __init__(self, server: grpc.aio.Server, service_names: Collection[str]) -> None:
        self._servicer = HealthServicer()
        self._names = ["", *service_names]
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]

    async def set_serving(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if serving else states.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)


def add_reflection(server: grpc.aio.Server, service_names: Collection[str]) -> None:
    """Server reflection for these full service names, health and reflection itself."""
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    names = [*service_names, health_name, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)  # type: ignore[no-untyped-call]


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Checks the secret before a servicer sees the call, and turns what escapes a servicer into a status."""

    def __init__(
        self, secret: str | None, bounds: RequestBounds | None = None,
        authorize: Callable[[str, Any], None] | None = None,
    ) -> None:
        self._secret = secret
        self._bounds = bounds
        self._authorize = authorize

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        refusal = self._refusal(handler_call_details)
        if refusal is not None:
            return _refuse(refusal, handler_call_details.method)
        return _wrap(handler, handler_call_details.method, self._bounds)

    def _refusal(self, details: grpc.HandlerCallDetails) -> Unauthenticated | None:
        if self._secret is not None and not metadata_has_secret(details.invocation_metadata, self._secret):
            return Unauthenticated("this call needs the cluster secret")
        try:
            if self._authorize is not None:
                self._authorize(details.method, details.invocation_metadata)
        except Unauthenticated as error:
            return error
        return None


def _wrap(handler: Any, method: str, bounds: RequestBounds | None) -> Any:
    kinds = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    kind, build = kinds[handler.request_streaming, handler.response_streaming]
    behavior = getattr(handler, kind)
    guard = _guard_stream if inspect.isasyncgenfunction(behavior) else _guard_call
    return build(
        guard(behavior, method),
        request_deserializer=_lenient(handler.request_deserializer, method, bounds),
        response_serializer=handler.response_serializer,
    )


class _Malformed:
    """Stands for a request that was not or could not be parsed: gRPC itself would answer that with UNKNOWN."""

    def __init__(self, error: InvalidArgument) -> None:
        self.error = error


def _lenient(
    deserializer: Callable[[bytes], Any] | None, method: str, bounds: RequestBounds | None
) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            if bounds is not None:
                bounds.check(method, data)
            return deserializer(data)
        except InvalidArgument as error:
            return _Malformed(error)
        except DecodeError:
            return _Malformed(
                InvalidArgument("the request is not a message of the expected type, or holds text that is not UTF-8")
            )

    return deserialize


def _unread(data: bytes) -> None:
    """Who is refused is refused unread."""


def _check_parsed(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise request.error


def _refuse(refusal: Unauthenticated, method: str) -> Any:
    """For a call of any kind: a handler of streams does not wait for the request, which may never come."""

    async def refuse(requests: Any, context: Context) -> AsyncIterator[Any]:
        raise refusal
        yield  # makes it a generator

    return grpc.stream_stream_rpc_method_handler(_guard_stream(refuse, method), request_deserializer=_unread)


def _guard_call(behavior: Callable[[Any, Context], Any], method: str) -> Callable[[Any, Context], Any]:
    """Of a coroutine: one that returns its reply, or one that writes a stream of them to the context."""

    async def guarded(request: Any, context: Context) -> Any:
        try:
            _check_parsed(request)
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the process boundary
            await _abort(context, error, method)

    return guarded


def _guard_stream(behavior: Callable[[Any, Context], Any], method: str) -> Callable[[Any, Context], Any]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            _check_parsed(request)
            async with contextlib.aclosing(behavior(request, context)) as replies:
                async for reply in replies:
                    yield reply
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the process boundary
            await _abort(context, error, method)

    return guarded


async def _abort(context: Context, error: Exception, method: str) -> None:
    typed = error if isinstance(error, PdRelayError) else _logged(error, method)
    metadata = [(CODE_METADATA_KEY, typed.code.value)]
    if typed.retry_after_ms is not None:
        metadata.append((RETRY_AFTER_METADATA_KEY, str(typed.retry_after_ms)))
    await context.abort(typed.grpc_status, typed.message[:MAX_DETAIL_CHARS], tuple(metadata))


def _logged(error: Exception, method: str) -> Internal:
    incident = secrets.token_hex(4)
    log.error("incident %s in %s", incident, method, exc_info=error)
    return Internal(f"internal error (incident {incident}; the server's log has the details)")
