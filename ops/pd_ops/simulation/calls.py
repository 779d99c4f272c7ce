"""One RPC over a simulated connection, from either end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from pd_ops.simulation.network import Connection, Metadata, Network
from pd_ops.simulation.process import PROCESS, Process

END = object()
CONNECTION_LOST = "the connection is lost"


class MemoryCall:
    """A `network.Call`. At the client's end replies come in order, then the status."""

    def __init__(
        self, network: Network, client: Process, path: str, data: bytes, *, is_stream: bool, metadata: Metadata
    ) -> None:
        self.number = network.next_call_number()
        self.path = path
        self.data = data
        self.metadata = metadata
        self.is_stream = is_stream
        self.client = client
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None
        self._network = network
        self._replies: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None  # for the next reply
        self._is_done = False
        self._last_arrival_s = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def method(self) -> str:
        return self.path.rpartition("/")[2]

    # At the client

    def start(self, address: str, timeout_s: float | None) -> None:
        if timeout_s is not None:
            self._deadline = self._network.loop.call_later(timeout_s, self._expire)
        connection = self.connection = self._network.connect(self.client, address)
        if connection is None:
            self._network.loop.call_later(0.001, self.fail, grpc.StatusCode.UNAVAILABLE, "connection refused")
            return
        connection.calls[self.number] = self
        server = self._network.servers[address]
        self._network.carry(connection, server.process, lambda: server.serve(self))
        again_s = self._network.weather.duplicate_after_s(self)
        if again_s is not None:
            self._network.carry(
                connection, server.process, lambda: server.serve_again(self),
                not_before_s=self._network.loop.now_s + again_s,
            )

    async def next_reply(self) -> Any:
        """Bytes, or END. Raises AioRpcError."""
        while not self._replies:
            self._waiting = self._network.loop.create_future()
            await self._waiting
        item = self._replies.popleft()
        if isinstance(item, grpc.aio.AioRpcError):
            raise item
        return item

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if not self._is_done:
            self._finish()
            self._tell_server()

    def fail(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        if not self._is_done:
            self._finish()
            error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details=details)
            self._put(error)

    def broken_at_client(self) -> None:
        self.fail(grpc.StatusCode.UNAVAILABLE, CONNECTION_LOST)

    def _expire(self) -> None:
        if not self._is_done:
            self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._tell_server()

    def _take(self, item: Any) -> None:
        if not self._is_done:
            if item is END:
                self._finish()
            self._put(item)

    def _put(self, item: Any) -> None:
        self._replies.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _finish(self) -> None:
        self._is_done = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self.connection is not None and self.task is None:
            self.connection.calls.pop(self.number, None)

    def _tell_server(self) -> None:
        connection = self.connection
        if connection is not None and connection.client_open:
            self._carry(connection, connection.server, self._cancelled_by_client)

    # At the server

    def send(self, data: bytes) -> None:
        assert self.connection is not None
        self._carry(self.connection, self.client, lambda: self._take(data))

    def end(self, code: grpc.StatusCode, details: str, metadata: Metadata) -> None:
        connection = self.connection
        assert connection is not None
        self.task = None
        if self._is_done:
            connection.calls.pop(self.number, None)
        if code is grpc.StatusCode.OK:
            self._carry(connection, self.client, lambda: self._take(END))
        else:
            self._carry(connection, self.client, lambda: self.fail(code, details, metadata))

    def broken_at_server(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _cancelled_by_client(self) -> None:
        if self.task is not None and (self.is_stream or not self._network.weather.survives_its_caller(self)):
            self.task.cancel()

    def _carry(self, connection: Connection, receiver: Process, action: Callable[[], None]) -> None:
        """In order."""
        self._last_arrival_s = self._network.carry(
            connection, receiver, action, not_before_s=self._last_arrival_s
        )


class MemoryChannel(grpc.aio.Channel):
    """A channel of the process in which its calls are made."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        async def call(request: Any, *, timeout: float | None = None, metadata: Any = (), **_: Any) -> Any:
            one = self._start(method, request_serializer(request), timeout, metadata, is_stream=False)
            try:
                return response_deserializer(await one.next_reply())
            finally:
                one.cancel()

        return call

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        def call(request: Any, *, timeout: float | None = None, metadata: Any = (), **_: Any) -> StreamCall:
            one = self._start(method, request_serializer(request), timeout, metadata, is_stream=True)
            return StreamCall(one, response_deserializer)

        return call

    def stream_unary(self, *arguments: Any, **more: Any) -> Any:
        raise NotImplementedError("no service here has such calls")

    stream_stream = stream_unary

    async def close(self, grace: float | None = None) -> None:
        """Its calls are cancelled by those who made them."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await asyncio.Event().wait()

    async def channel_ready(self) -> None:
        return

    async def __aenter__(self) -> MemoryChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _start(self, path: str, data: bytes, timeout_s: float | None, metadata: Any, *, is_stream: bool) -> MemoryCall:
        client = PROCESS.get()
        assert client is not None, "a call is made by a process"
        call = MemoryCall(self._network, client, path, data, is_stream=is_stream, metadata=tuple(metadata or ()))
        call.start(self._address, timeout_s)
        return call


class StreamCall:
    """What a caller of a streaming method has."""

    def __init__(self, call: MemoryCall, deserialize: Callable[[bytes], Any]) -> None:
        self._call = call
        self._deserialize = deserialize

    def cancel(self) -> None:
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (item := await self._call.next_reply()) is not END:
                yield self._deserialize(item)
        finally:
            self._call.cancel()
