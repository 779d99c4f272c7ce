"""Handoffs over connections that are reset, half-open, or opened by strangers."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgpack
import pytest

from kv_transfer.journey import SourceInfo
from kv_transfer.manifest import Hello
from kv_transfer.manifest_wire import pack_hello
from kv_transfer.transports.tcp import TcpPull
from kv_transfer.transports.tcp_frames import RANGE, REQUEST
from kv_transfer.transports.tcp_source import TcpSource
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from pd_engine.service.client import connect, kv_source_stub
from pd_engine.settings import TransferSettings
from pd_kernels.block_stream import receive_and_checksum_pieces, receive_pieces
from support.handoffs import FINGERPRINT, LAYOUT, SECRET, DestinationSide, SourceSide, new_key, running
from support.leaks import assert_nothing_left, assert_pool_is_free, until
from support.proxy import Proxy

PATIENT = TransferSettings(transport="tcp", lease_ms=60_000, fetch_timeout_ms=60_000)
HASTY = TransferSettings(transport="tcp", lease_ms=3_000, fetch_timeout_ms=2_000)  # where a deadline is waited for
NUM_TOKENS = 400
NUM_BLOCKS = 64


class ProxiedTcpSource(TcpSource):
    """Tells pullers the proxy's port."""

    proxy: Proxy

    def metadata(self) -> Mapping[str, Any]:
        return {"host": "127.0.0.1", "port": self.proxy.port}


class Lab:
    """Source and destination with a proxy before the source's gRPC server, and one before its data port."""

    def __init__(self, settings: TransferSettings = PATIENT) -> None:
        self.transport = ProxiedTcpSource(secret=SECRET, host="127.0.0.1")
        self.source = SourceSide(settings=settings, transports=[self.transport])
        self.destination = DestinationSide(
            settings=settings,
            make_transports=lambda arena: [TcpPull(arena, secret=SECRET, receive=receive_and_checksum_pieces)],
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with running(self.source, self.destination):
            port = TcpSource.metadata(self.transport)["port"]
            async with Proxy(self.source.source.address) as self.calls, Proxy(f"127.0.0.1:{port}") as self.data:
                self.transport.proxy = self.data
                self.source.source.address = self.calls.address
                yield

    async def hand_over(self) -> None:
        key = new_key()
        self.destination.reserve_and_pull(key, NUM_TOKENS, self.source.begin(key, NUM_TOKENS))
        sent = self.source.contents(key, NUM_TOKENS)
        self.source.publish_all(key, NUM_TOKENS)
        result = await self.destination.result_of(key)
        assert self.destination.contents(result, NUM_TOKENS) == sent
        self.destination.free(key)

    async def settle(self) -> None:
        destination, source = self.destination, self.source
        for key in list(destination.failed):
            destination.destination.release(key.journey_id, key.attempt)
            source.source.release(key.journey_id, key.attempt)
        await until(lambda: destination.destination.num_quarantined == 0 and source.source.num_pins == 0)
        assert_pool_is_free(destination.pool)
        assert_pool_is_free(source.pool)


async def test_a_manifest_that_breaks_off_is_asked_for_again() -> None:
    lab = Lab()
    async with lab.running():
        key = new_key()
        lab.destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.source.publish(key, 0, NUM_TOKENS)
        book = lab.destination.destination._book
        await until(lambda: book.get(key).pieces is not None and book.get(key).pieces.num_verified_bytes > 0)
        lab.calls.cut()
        sent = lab.source.contents(key, NUM_TOKENS)
        lab.source.publish_all(key, NUM_TOKENS)
        result = await lab.destination.result_of(key)
        assert lab.destination.contents(result, NUM_TOKENS) == sent
        assert result.num_bytes == NUM_TOKENS * LAYOUT.bytes_per_token
        lab.destination.free(key)
        await lab.settle()


@pytest.mark.parametrize("at_byte", [1, 200, 5_000, 100_000, 200_000])
async def test_a_data_connection_that_is_reset_breaks_the_pull_and_no_other(at_byte: int) -> None:
    lab = Lab()
    async with lab.running():
        await lab.hand_over()
        lab.data.cut_at_byte = lab.data.num_bytes + at_byte
        key = new_key()
        lab.destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.publish_all(key, NUM_TOKENS)
        with pytest.raises(Unavailable):
            await lab.destination.result_of(key)
        await lab.hand_over()
        await lab.settle()


async def test_a_half_open_data_connection_costs_the_deadline_of_a_fetch() -> None:
    lab = Lab(HASTY)
    async with lab.running():
        await lab.hand_over()
        lab.data.stop()
        key = new_key()
        lab.destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS))
        lab.source.publish_all(key, NUM_TOKENS)
        with pytest.raises(DeadlineExceeded):
            await lab.destination.result_of(key)
        lab.data.heal()
        await lab.hand_over()
        await lab.settle()


async def test_a_half_open_control_connection_costs_the_deadline_of_the_lease() -> None:
    lab = Lab(HASTY)
    async with lab.running():
        await lab.hand_over()
        key = new_key()
        lab.destination.reserve_and_pull(key, NUM_TOKENS, lab.source.begin(key, NUM_TOKENS, lease_ms=3_000))
        lab.calls.stop()
        lab.source.publish_all(key, NUM_TOKENS)
        await lab.destination.end_of(key)
        assert key in lab.destination.failed
        await until(lambda: lab.source.source.num_pins == 0)
        lab.calls.heal()
        await lab.hand_over()
        await lab.settle()


async def test_strangers_get_nothing_and_cost_nothing() -> None:
    async with assert_nothing_left(except_files="memfd"):
        lab = Lab()
        async with lab.running():
            strangers = []
            for number in range(100):
                reader, writer = await asyncio.open_connection("127.0.0.1", lab.data.port)
                strangers.append(writer)
                if number % 3:
                    writer.write(bytes(128 * (number % 3)))
            await lab.hand_over()
            for writer in strangers:
                writer.transport.abort()
            await lab.hand_over()
            await lab.settle()
        del lab, reader


def request(number: int, token: str, ranges: list[tuple[int, int, int]]) -> bytes:
    packed = b"".join(struct.pack("<IIQ", *item) for item in ranges)
    assert len(packed) == len(ranges) * RANGE.itemsize
    return REQUEST.pack(number, token.encode(), len(ranges)) + packed


@pytest.mark.parametrize("ranges", [
    [], [(0, 0, 4096)], [(0, 1, 0)], [(0, 1, 1 << 62)], [(0, 1, (1 << 64) - 1)], [(999, 16, 4096)],
    [(0, 1 << 31, 4096)], [(1, 16, 4096)], [(0, LAYOUT.piece_bytes(0) + 1, 4096)], [(0, 16, 4095)],
])
async def test_a_request_that_makes_no_sense_is_hung_up_on(ranges: list[tuple[int, int, int]]) -> None:
    lab = Lab()
    async with lab.running():
        key = new_key()
        info = lab.source.begin(key, NUM_TOKENS)
        pull = TcpPull(lab.destination.arena, secret=SECRET, receive=receive_pieces)
        connection = await pull.connect(
            lab.transport.metadata(), epoch=info.epoch, token=info.token, num_blocks=NUM_BLOCKS, timeout_s=5
        )
        sock: socket.socket = connection._idle[0].sock  # type: ignore[attr-defined]
        await asyncio.to_thread(sock.sendall, request(1, info.token, ranges))
        assert await asyncio.to_thread(sock.recv, 1) == b""
        await connection.close()
        lab.source.source.release(key.journey_id, 1)
        await lab.hand_over()


HELLO = Hello(
    worker_id="decode-0", fingerprint=FINGERPRINT, layout=LAYOUT, host_id="h", transports=("tcp",), checksums=True,
    lease_ms=1_000,
)
NARROW = CacheLayout(
    block_size=16,
    components=tuple(
        Component(name=c.name, kind=ComponentKind.PAGED, width=64, dtype=c.dtype, first_position=c.first_position)
        for c in LAYOUT.components
    ),
)


@pytest.mark.parametrize(("changes", "named"), [
    ({"layout": CacheLayout(block_size=32, components=LAYOUT.components)}, "block_size is 16 at .* and 32 at"),
    ({"layout": NARROW}, "width of component layers.0 is 96 at prefill-0 .* and 64 at decode-0"),
    ({"layout": CacheLayout(block_size=16, components=LAYOUT.components[:2])}, "number of components is 3 .* and 2"),
    ({"fingerprint": "fedcba"}, "fingerprint is 0123456789abcdef at prefill-0 .* and fedcba at decode-0"),
])
async def test_unequal_shapes(changes: dict[str, Any], named: str) -> None:
    """`unequal-shapes`, `mtp-mismatch`: refused at connection, with both values named; nothing is read or written."""
    source, destination = SourceSide(), DestinationSide(**changes)
    async with running(source, destination):
        before = bytes(destination.arena.buffer)
        key = new_key()
        destination.reserve_and_pull(key, 64, source.begin(key, 64))
        source.publish_all(key, 64)
        with pytest.raises(FailedPrecondition, match=named):
            await destination.result_of(key)
        assert bytes(destination.arena.buffer)[4096:] == before[4096:]  # generations apart
        destination.destination.release(key.journey_id, 1)
        assert_pool_is_free(destination.pool)


BAD_CALLS: list[tuple[dict[str, Any], grpc.StatusCode]] = [
    ({"token": "0" * 32}, grpc.StatusCode.NOT_FOUND),
    ({"token": "../../etc/passwd"}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"token": ""}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"source_epoch": "f" * 32}, grpc.StatusCode.NOT_FOUND),
    ({"source_epoch": "x"}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"destination_epoch": "x"}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"journey": pb.JourneyRef(journey_id="x", attempt=1)}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"journey": pb.JourneyRef(journey_id="a" * 32, attempt=0)}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"journey": pb.JourneyRef(journey_id="a" * 32, attempt=1)}, grpc.StatusCode.NOT_FOUND),
    ({"hello": b""}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"hello": msgpack.packb({"fingerprint": 3})}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"hello": bytes(300_000)}, grpc.StatusCode.INVALID_ARGUMENT),
]


@pytest.mark.parametrize(("changes", "status"), BAD_CALLS)
async def test_a_bad_call_is_answered_and_changes_nothing(changes: dict[str, Any], status: grpc.StatusCode) -> None:
    source = SourceSide()
    async with running(source):
        key = new_key()
        info = source.begin(key, 64)
        channel = connect(info.address, SECRET)
        good = {
            "journey": pb.JourneyRef(journey_id=key.journey_id, attempt=1), "token": info.token,
            "source_epoch": info.epoch, "destination_epoch": "d" * 32, "hello": pack_hello(HELLO),
        }
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in kv_source_stub(channel).Manifest(pb.ManifestRequest(**{**good, **changes})):
                pass
        assert caught.value.code() is status
        assert source.source.num_pins == 1
        await channel.close()


async def test_without_the_secret_no_call_is_answered() -> None:
    source = SourceSide()
    async with running(source):
        key = new_key()
        info = source.begin(key, 64)
        channel = connect(info.address, None)
        commit = pb.CommitRequest(journey=pb.JourneyRef(journey_id=key.journey_id, attempt=1), token=info.token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kv_source_stub(channel).Commit(commit)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert source.source.num_pins == 1
        await channel.close()


async def test_a_commit_before_the_end_is_refused_and_a_repeated_one_is_not() -> None:
    source = SourceSide()
    async with running(source):
        key = new_key()
        info = source.begin(key, 64)
        channel = connect(info.address, SECRET)
        stub = kv_source_stub(channel)
        commit = pb.CommitRequest(journey=pb.JourneyRef(journey_id=key.journey_id, attempt=1), token=info.token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Commit(commit)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        source.publish_all(key, 64)
        await until(lambda: source.source._book.get(key).closing is not None)
        await stub.Commit(commit)
        await stub.Commit(commit)
        assert source.source.num_pins == 0
        assert len(source.ended) == 1
        await channel.close()


async def test_only_one_life_of_a_destination_may_pull() -> None:
    source, destination = SourceSide(), DestinationSide()
    async with running(source, destination):
        key = new_key()
        info: SourceInfo = source.begin(key, 64)
        channel = connect(info.address, SECRET)
        call = kv_source_stub(channel).Manifest(pb.ManifestRequest(
            journey=pb.JourneyRef(journey_id=key.journey_id, attempt=1), token=info.token, source_epoch=info.epoch,
            destination_epoch="d" * 32, hello=pack_hello(HELLO),
        ))
        assert await call.read() is not grpc.aio.EOF
        destination.reserve_and_pull(key, 64, info)
        await destination.end_of(key)
        assert destination.failed[key][0].code.value == "gone"
        call.cancel()
        await channel.close()
