"""Serves an ASGI application in the event loop that is running already."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pd_engine.errors import InvalidArgument
from pd_router.tls import Tls

MAX_HEADER_BYTES = 64 * 1024
CLOSE_TIMEOUT_S = 1
HEAD_S = 10.0  # from the first byte of a request's head to its last, and before the first request
BODY_S = 60.0


class _QuietServer(uvicorn.Server):
    """Leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ImpatientProtocol(H11Protocol):
    """Hangs up on a client whose request does not come, or comes drop by drop."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_within(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_within(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if before is not state:
                self._expect_within(BODY_S)
        elif state is not h11.IDLE:  # all is there
            self._expect_within(None)
        elif self._deadline is None:
            self._expect_within(HEAD_S)

    def _expect_within(self, seconds: float | None) -> None:
        """Until then the head or the body that is under way is to be complete; None: nothing is."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class HttpServer:
    def __init__(
        self, app: ASGIApp, host: str, port: int, *, shares_port: bool = False, tls: Tls | None = None
    ) -> None:
        """Listens at once, so that an address in use is found here.

        Args:
            shares_port: whether another process of this user that says so too may listen on the same port.
            tls: None: plain text.

        Raises:
            InvalidArgument: the address cannot be bound.
        """
        self._socket = _bind(host, port, shares_port=shares_port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=_ImpatientProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
            ssl_ca_certs=None if tls is None else tls.client_ca,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls is not None and tls.client_ca is not None else ssl.CERT_NONE,
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http server")

    async def stop(self, drain_s: int = CLOSE_TIMEOUT_S) -> None:
        """Accepts nothing more, and ends open connections after `drain_s`."""
        self._server.config.timeout_graceful_shutdown = drain_s
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


def _bind(host: str, port: int, *, shares_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise InvalidArgument(f"cannot listen on {host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock
