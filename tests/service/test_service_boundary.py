"""What crosses a worker's gRPC boundary: the secret, typed errors, health, reflection, and nothing of the inside."""

from __future__ import annotations

import asyncio
import contextlib
import pkgutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import pd_engine.service
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import ERROR_CLASSES, Gone, InvalidArgument, PdRelayError, ResourceExhausted
from pd_engine.service import client
from pd_engine.service import server as service_server
from pd_engine.service.options import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from pd_engine.service.secret import new_secret, parse_secret
from pd_engine.service.server import RETRY_AFTER_METADATA_KEY, Health, add_reflection, bind, build_server

SECRET = "correct-horse-battery-staple"
SERVICE = "pdrelay.internal.v1.DecodeWorker"


@dataclass
class Echo(worker_pb2_grpc.DecodeWorkerServicer):
    """Answers, or raises what the test put there."""

    raises: Exception | None = None
    calls: list[str] = field(default_factory=list)

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveReply:
        self.calls.append(request.router_id)
        if self.raises:
            raise self.raises
        return pb.ReserveReply(lease_id="lease")

    async def Pull(self, request: pb.PullRequest, context: Any) -> pb.PullReply:
        await context.abort(grpc.StatusCode.DATA_LOSS, "own abort")
        raise AssertionError


class Streams(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillReply]:
        yield pb.PrefillReply(source=pb.SourceInfo(epoch="e"))
        if self.error:
            raise self.error


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, Echo, Streams]]:
    server = build_server(secret=SECRET)
    echo, streams = Echo(), Streams(None)
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(echo, server)
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(streams, server)
    health = Health(server, [SERVICE])
    add_reflection(server, [SERVICE])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    await health.set_serving(True)
    yield f"127.0.0.1:{port}", echo, streams
    await server.stop(None)


async def reserve(address: str, secret: str | None, timeout_s: float = 30) -> pb.ReserveReply:
    async with client.connect(address, secret) as channel:
        return await client.decode_stub(channel).Reserve(pb.ReserveRequest(router_id="r"), timeout=timeout_s)


async def prefill(address: str, secret: str | None, replies: list[pb.PrefillReply]) -> None:
    async with client.connect(address, secret) as channel:
        async for reply in client.prefill_stub(channel).Prefill(pb.PrefillRequest(), timeout=30):
            replies.append(reply)  # noqa: PERF401 - it may raise midway


async def test_the_right_secret_is_served(served: tuple[str, Echo, Streams]) -> None:
    assert (await reserve(served[0], SECRET)).lease_id == "lease"


async def test_a_busy_peer_has_time_to_answer_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError):
            await reserve(f"127.0.0.1:{silent.getsockname()[1]}", SECRET, timeout_s=1.5)
        assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("secret", [None, "wrong-horse-battery-staple", SECRET + "x", SECRET[:-1]])
async def test_any_other_secret_is_refused_before_the_servicer(
    served: tuple[str, Echo, Streams], secret: str | None
) -> None:
    address, echo, _ = served
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reserve(address, secret)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert SECRET not in (caught.value.details() or "")
    assert echo.calls == []


async def test_streams_need_the_secret_too(served: tuple[str, Echo, Streams]) -> None:
    replies: list[pb.PrefillReply] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill(served[0], None, replies)
    assert replies == []
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_is_refused_before_its_message_has_come(served: tuple[str, Echo, Streams]) -> None:
    """Or it would cost a task for as long as the stranger likes."""
    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with client.connect(served[0], None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(f"/{SERVICE}/Reserve")(never(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings


LIMITS = ("grpc.server_handshake_timeout_ms", "grpc.http2.settings_timeout", "grpc.max_connection_idle_ms")


@pytest.mark.parametrize(("words", "option"), list(zip((b"", PREFACE, PREFACE), LIMITS, strict=True)), ids=LIMITS)
async def test_a_stranger_that_says_nothing_more_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, words: bytes, option: str
) -> None:
    """Each limit by itself: the others are long."""
    options = [
        (name, 200 if name == option else 600_000 if name in (*LIMITS, "grpc.keepalive_timeout_ms") else value)
        for name, value in service_server.SERVER_OPTIONS
    ]
    monkeypatch.setattr(service_server, "SERVER_OPTIONS", options)
    server = build_server(secret=SECRET)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words)
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    writer.close()
    await server.stop(None)


async def test_a_worker_has_a_bounded_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_server, "MAX_CONNECTIONS", 3)
    server = build_server(secret=SECRET)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    hung_up = [asyncio.create_task(reader.read()) for reader, _ in strangers]
    done, waiting = await asyncio.wait(hung_up, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    for task in waiting:
        task.cancel()
    for _, writer in strangers:
        writer.transport.abort()
    await server.stop(None)


@pytest.mark.parametrize("cls", ERROR_CLASSES.values())
async def test_a_typed_error_is_the_same_error_at_the_caller(
    served: tuple[str, Echo, Streams], cls: type[PdRelayError]
) -> None:
    address, echo, _ = served
    sent = cls() if cls is Gone else cls("what was wrong: é, 100 %\nand what is allowed")
    echo.raises = sent
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reserve(address, SECRET)
    received = client.typed_error(caught.value)
    assert type(received) is cls
    assert received.message == sent.message
    assert received.retry_after_ms is None


async def test_the_retry_hint_arrives(served: tuple[str, Echo, Streams]) -> None:
    address, echo, _ = served
    echo.raises = ResourceExhausted("no room", retry_after_ms=250)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reserve(address, SECRET)
    assert client.typed_error(caught.value).retry_after_ms == 250


@pytest.mark.parametrize("hint", ["9" * 5_000, "-1", "1e3", "²", ""])
def test_a_retry_hint_that_is_none_is_left_out(hint: str) -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata((RETRY_AFTER_METADATA_KEY, hint)), "away"
    )
    assert client.typed_error(error).retry_after_ms is None


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, [("grpc.max_send_message_length", -1)]], ids=["here", "there"])
async def test_a_request_too_long_for_grpc_is_the_callers_mistake(
    served: tuple[str, Echo, Streams], options: list[tuple[str, int]]
) -> None:
    request = pb.ReserveRequest(router_id="x" * (MAX_MESSAGE_BYTES + 1))
    async with client.SecretChannel(grpc.aio.insecure_channel(served[0], options=options), SECRET) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.decode_stub(channel).Reserve(request, timeout=30)
    typed = client.typed_error(caught.value)
    assert isinstance(typed, InvalidArgument)
    assert "larger than max" in typed.message


@pytest.mark.parametrize("streaming", [False, True])
async def test_what_was_not_foreseen_is_logged_and_not_told(
    served: tuple[str, Echo, Streams], caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    address, echo, streams = served
    echo.raises = streams.error = KeyError("inner detail 4711")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (prefill(address, SECRET, []) if streaming else reserve(address, SECRET))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "4711" not in (caught.value.details() or "")
    assert "inner detail 4711" in caplog.text
    echo.raises = None
    assert (await reserve(address, SECRET)).lease_id == "lease"


async def test_an_error_after_the_first_reply_keeps_that_reply(served: tuple[str, Echo, Streams]) -> None:
    address, _, streams = served
    streams.error = InvalidArgument("too late")
    replies: list[pb.PrefillReply] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill(address, SECRET, replies)
    assert [reply.source.epoch for reply in replies] == ["e"]
    assert type(client.typed_error(caught.value)) is InvalidArgument


async def test_a_servicers_own_abort_passes(served: tuple[str, Echo, Streams]) -> None:
    async with client.connect(served[0], SECRET) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.decode_stub(channel).Pull(pb.PullRequest(), timeout=30)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "own abort")


async def test_health_and_reflection_answer(served: tuple[str, Echo, Streams]) -> None:
    async with client.connect(served[0], SECRET) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        async for reply in health.Watch(health_pb2.HealthCheckRequest(), timeout=30):
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            break
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflect.ServerReflectionInfo(iter([question]), timeout=30)
        names = [service.name async for reply in call for service in reply.list_services_response.service]
    assert SERVICE in names


async def test_a_port_in_use_is_a_typed_error(served: tuple[str, Echo, Streams]) -> None:
    port = int(served[0].rpartition(":")[2])
    with pytest.raises(InvalidArgument, match="cannot listen"):
        bind(build_server(secret=SECRET), "127.0.0.1", port)


def test_secrets_are_checked_without_being_repeated() -> None:
    assert parse_secret(f" {SECRET}\n") == SECRET
    assert parse_secret(new_secret()) != parse_secret(new_secret())
    for bad in ("", "short", "x" * 257, "with-a-línea-" + "y" * 20, "line\nbreak-" + "z" * 20):
        with pytest.raises(InvalidArgument) as caught:
            parse_secret(bad)
        assert not bad or bad not in str(caught.value)


def test_the_plumbing_imports_no_torch() -> None:
    names = ", ".join(sorted(module.name for module in pkgutil.iter_modules(pd_engine.service.__path__)))
    code = f"import sys; from pd_engine.service import {names}; sys.exit(bool({{'torch', 'ray'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("secret", "status"), [(SECRET, "INVALID_ARGUMENT"), ("x" * 16, "UNAUTHENTICATED")])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12\x02\xff\xfe"])
async def test_bytes_that_are_no_message_get_a_typed_error(
    served: tuple[str, Echo, Streams], secret: str, status: str, data: bytes
) -> None:
    address, echo, _ = served
    async with client.connect(address, secret) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Reserve", request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(data, timeout=30)
    assert caught.value.code().name == status
    assert echo.calls == []
