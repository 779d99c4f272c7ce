"""Channels to workers: keepalive, the secret on every call, and errors typed again. Imports no torch.

    channel = connect("10.0.0.2:7001", secret)
    decode = decode_stub(channel)
    try:
        reply = await decode.Reserve(request, timeout=1.0)
    except grpc.aio.AioRpcError as error:
        raise typed_error(error) from None
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from pd_engine import errors
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import ErrorCode, InvalidArgument, PdRelayError, ResourceExhausted
from pd_engine.service.options import CHANNEL_OPTIONS, KEEPALIVE_TIMEOUT_MS
from pd_engine.service.secret import secret_metadata
from pd_engine.service.server import CODE_METADATA_KEY, RETRY_AFTER_METADATA_KEY

if TYPE_CHECKING:
    from pd_engine.contracts.worker_pb2_grpc import (
        DecodeWorkerAsyncStub,
        KvSourceAsyncStub,
        PrefillWorkerAsyncStub,
        WorkerAsyncStub,
    )

_TOO_LONG = ("CLIENT: Sent message larger than max", "SERVER: Received message larger than max")  # as gRPC puts it


def connect(
    address: str, secret: str | None, *, keepalive_timeout_ms: int = KEEPALIVE_TIMEOUT_MS,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """A channel to "host:port"; it connects with the first call and reconnects by itself. Close it when done.

    Args:
        keepalive_timeout_ms: how long the other side may take to answer a ping before the connection counts as cut.
        credentials: for TLS; None: plain text.
    """
    options = [*CHANNEL_OPTIONS, ("grpc.keepalive_timeout_ms", keepalive_timeout_ms)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return channel if secret is None else SecretChannel(channel, secret)


def worker_stub(channel: grpc.aio.Channel) -> WorkerAsyncStub:
    return worker_pb2_grpc.WorkerStub(channel)


def prefill_stub(channel: grpc.aio.Channel) -> PrefillWorkerAsyncStub:
    return worker_pb2_grpc.PrefillWorkerStub(channel)


def decode_stub(channel: grpc.aio.Channel) -> DecodeWorkerAsyncStub:
    return worker_pb2_grpc.DecodeWorkerStub(channel)


def kv_source_stub(channel: grpc.aio.Channel) -> KvSourceAsyncStub:
    return worker_pb2_grpc.KvSourceStub(channel)


def typed_error(error: grpc.RpcError) -> PdRelayError:
    """`errors.from_grpc`, with the exact code and the retry hint where the server sent them.

    A message that is too long for gRPC itself is the caller's mistake, not a lack of room.
    """
    typed = errors.from_grpc(error)
    trailing = getattr(error, "trailing_metadata", lambda: None)()
    metadata = {str(key): value for key, value in trailing or ()}
    code = metadata.get(CODE_METADATA_KEY)
    if code is None and isinstance(typed, ResourceExhausted) and typed.message.startswith(_TOO_LONG):
        typed = InvalidArgument(f"the request is too long: {typed.message}")
    if code is not None and code != typed.code.value and code in {known.value for known in ErrorCode}:
        typed = errors.from_code(str(code), typed.message)
    retry_after = str(metadata.get(RETRY_AFTER_METADATA_KEY, ""))
    if re.fullmatch("[0-9]{1,9}", retry_after):
        typed.retry_after_ms = int(retry_after)
    return typed


class MetadataChannel(grpc.aio.Channel):
    """A channel whose every call carries some metadata. (Client interceptors would cost a task a call.)"""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_stream(*args, **kwargs))

    def _with_metadata(self, multicallable: Any) -> Any:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return multicallable(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()


class SecretChannel(MetadataChannel):
    """A channel whose every call carries the cluster secret."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        super().__init__(channel, secret_metadata(secret))
