"""Streams of admitted pullers: how many a source keeps, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_transfer.transport import Authorize, Fetched
from kv_transfer.transports import stream_book, streams, tcp
from kv_transfer.transports.handshake import connect
from kv_transfer.transports.stream_book import Phase, Stream, crowded_out
from kv_transfer.transports.streams import StreamPort
from kv_transfer.transports.tcp_frames import RANGE, REPLY, REQUEST, Status
from pd_engine.errors import DeadlineExceeded
from pd_kernels.block_stream import receive_and_checksum_pieces
from support.handoffs import SECRET
from support.leaks import assert_nothing_left, until
from support.transport_cases import EPOCH, TIMEOUT_S, Pair, transport_pair

LONG_S = 1_000.0


def all_live(token: str) -> frozenset[int]:
    return frozenset()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Callable[..., Stream]:
    def make(token: str = "a", phase: Phase = Phase.IDLE) -> Stream:
        clock.now_s += 1
        stream = Stream(socket.socket(), token, clock)
        stream.enter(phase)
        stream.sock.close()
        return stream

    return make


@pytest.mark.parametrize(("phase", "limit_s"), [
    (Phase.IDLE, stream_book.IDLE_S), (Phase.ASKING, stream_book.REQUEST_S),
])
def test_what_has_lasted_too_long(make: Callable[..., Stream], clock: Clock, phase: Phase, limit_s: float) -> None:
    stream = make(phase=phase)
    assert not stream.is_overdue(clock.now_s + limit_s, lambda token: frozenset())
    assert stream.is_overdue(clock.now_s + limit_s + 1, lambda token: frozenset())


def test_a_reply_may_take_as_long_as_its_token_lives(make: Callable[..., Stream], clock: Clock) -> None:
    stream = make("mine", Phase.ANSWERING)
    assert not stream.is_overdue(LONG_S, {"mine": frozenset({1})}.get)
    assert not stream.is_overdue(clock.now_s + stream_book.REPLY_S, {}.get)
    assert stream.is_overdue(LONG_S, {}.get)


def test_the_one_that_was_idle_for_longest_goes(
    make: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_book, "MAX_STREAMS", 4)
    monkeypatch.setattr(stream_book, "MAX_A_TOKEN", 2)
    busy, older, newer = make("a", Phase.ANSWERING), make("b"), make("a")
    assert crowded_out(make("b"), [busy, older, newer], all_live) is None
    assert crowded_out(make("a"), [busy, older, newer], all_live) is newer, "of those with the same token"
    assert crowded_out(make("c"), [busy, older, newer, make("d")], all_live) is older
    newer.enter(Phase.ASKING)
    new = make("a")
    assert crowded_out(new, [busy, older, newer], all_live) is new
    older.cut()
    assert crowded_out(make("c"), [busy, older, newer, make("d")], all_live) is None


def test_of_too_many_in_all_those_go_whose_token_has_ended(
    make: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_book, "MAX_STREAMS", 5)
    live: Authorize = {"live": frozenset({1}), "new": frozenset({1})}.get
    idle, single, answered = make("live"), make("other"), make("ended", Phase.ANSWERING)
    first, second = make("ended", Phase.ASKING), make("ended", Phase.ASKING)
    assert crowded_out(make("new"), [idle, single, answered, second, first], live) is first
    first.cut()
    second.cut()
    assert crowded_out(make("new"), [idle, single, answered, *(make("live") for _ in range(2))], live) is single


def test_of_too_many_in_all_one_goes_of_a_token_that_too_many_have_come_to_show(
    make: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_book, "MAX_STREAMS", 4)
    monkeypatch.setattr(stream_book, "MAX_A_TOKEN", 2)
    streams = [make(token, Phase.ASKING) for token in "abbb"]
    assert crowded_out(make("c"), streams, all_live) is streams[1]
    streams[1].token = "a"
    new = make("c")
    assert crowded_out(new, streams, all_live) is new


def test_a_stream_is_counted_under_tokens_that_are_accepted(make: Callable[..., Stream]) -> None:
    live: Authorize = {"mine": frozenset({1}), "next": frozenset({2})}.get
    stream = make("mine")
    assert not stream.may_read("made up", [1], live)
    assert stream.token == "mine"
    assert not stream.may_read("next", [1, 2], live)
    assert stream.may_read("next", [2], live)
    assert (stream.token, stream.num_refusals) == ("next", 0)


def port_of(pair: Pair) -> StreamPort:
    port: StreamPort = pair.source._port  # type: ignore[attr-defined]
    return port


async def come_in(pair: Pair, token: str) -> socket.socket:
    metadata = pair.source.metadata()
    return await connect(
        (metadata["host"], metadata["port"]), secret=SECRET, epoch=EPOCH, token=token, timeout_s=TIMEOUT_S
    )


async def test_a_request_that_does_not_go_on_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_book, "REQUEST_S", 0.05)
    monkeypatch.setattr(streams, "LOOK_PERIOD_S", 0.02)
    async with assert_nothing_left(except_files="memfd"), transport_pair("tcp") as pair:
        token = pair.new_token()
        with await come_in(pair, token) as puller:
            puller.setblocking(True)
            puller.send(REQUEST.pack(1, token.encode(), 1_000))
            with contextlib.suppress(ConnectionError):
                assert await asyncio.to_thread(puller.recv, 1) == b""
            await until(lambda: port_of(pair).num_streams == 0)


async def test_a_reply_that_is_read_drop_by_drop_ends_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_book, "REPLY_S", 0.1)
    monkeypatch.setattr(streams, "LOOK_PERIOD_S", 0.02)
    async with assert_nothing_left(except_files="memfd"), transport_pair("tcp") as pair:
        token = pair.new_token()
        ranges = np.zeros(20_000, dtype=RANGE)
        ranges["block"], ranges["offset"] = 2, pair.source_arena.piece_offset(0, 2)
        ranges["length"] = pair.source_arena.layout.piece_bytes(0)
        with await come_in(pair, token) as puller:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(puller, REQUEST.pack(1, token.encode(), len(ranges)) + ranges.tobytes())
            for _ in range(30):
                await loop.sock_recv(puller, 1)
                await asyncio.sleep(0.01)
            assert port_of(pair).num_streams == 1, "its token lives"
            del pair.allowed[token]
            with contextlib.suppress(ConnectionError):
                while port_of(pair).num_streams:
                    await loop.sock_recv(puller, 1)
                    await asyncio.sleep(0.001)
            await until(lambda: port_of(pair).num_streams == 0)


async def test_too_many_streams_with_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_book, "MAX_A_TOKEN", 2)
    async with assert_nothing_left(except_files="memfd"), transport_pair("tcp") as pair:
        token = pair.new_token()
        pullers = []
        for number in range(1, 4):
            pullers.append(await come_in(pair, token))
            await until(lambda number=number: port_of(pair).num_streams == min(number, 2))  # type: ignore[misc]
        pullers[0].setblocking(True)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.to_thread(pullers[0].recv, 1) == b""
        await until(lambda: port_of(pair).num_streams == 2)
        for puller in pullers:
            puller.close()


async def test_a_puller_that_asks_and_asks_with_a_token_that_does_not_live_is_hung_up_on() -> None:
    async with assert_nothing_left(except_files="memfd"), transport_pair("tcp") as pair:
        with await come_in(pair, pair.new_token()) as puller:
            puller.settimeout(TIMEOUT_S)
            ranges = np.zeros(1, dtype=RANGE)
            ranges["offset"], ranges["length"] = pair.source_arena.offsets[0], 1
            for number in range(stream_book.MAX_REFUSALS):
                puller.sendall(REQUEST.pack(number, b"f" * 32, 1) + ranges.tobytes())
                reply = await asyncio.to_thread(puller.recv, REPLY.size)
                assert REPLY.unpack(reply) == (number, Status.GONE)
            assert await asyncio.to_thread(puller.recv, 1) == b""


async def test_a_puller_opens_anew_what_the_source_has_hung_up_on() -> None:
    async with transport_pair("tcp") as pair:
        connection = await pair.connect()
        for block in range(2):
            spans = pair.spans([(0, block, block, 0, 16)])
            expected = pair.expected(spans)
            await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
            assert bytes(pair.arena.buffer) == expected
            for stream in list(port_of(pair)._streams):
                stream.cut()
            await until(lambda: port_of(pair).num_streams == 0)
        assert connection.usable
        await connection.close()


async def test_who_waits_for_a_stream_waits_as_long_as_others_get_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link many fetches may be under way, and none of them is stalled."""
    may_go_on = threading.Semaphore(0)

    def receive_late(*arguments: Any) -> Any:
        assert may_go_on.acquire(timeout=TIMEOUT_S)
        return receive_and_checksum_pieces(*arguments)

    monkeypatch.setattr(tcp, "NUM_STREAMS", 1)
    async with assert_nothing_left(except_files="memfd"), transport_pair("tcp") as pair:
        pair.pull._receive = receive_late  # type: ignore[attr-defined]
        connection: Any = await pair.connect()

        def fetch(timeout_s: float) -> asyncio.Task[Fetched]:
            return asyncio.create_task(
                connection.fetch(pair.spans([(0, 1, 1, 0, 16)]), token=pair.new_token(), timeout_s=timeout_s)
            )

        first, second, last = fetch(TIMEOUT_S), fetch(TIMEOUT_S), fetch(TIMEOUT_S)
        with pytest.raises(DeadlineExceeded):
            await fetch(0.001)  # nobody gets anything
        limits = list(connection._waiting)
        began_s = [limit.when() for limit in limits]
        assert len(limits) == 2
        may_go_on.release()
        await first
        assert all(limit.when() > began for limit, began in zip(limits, began_s, strict=True))
        may_go_on.release(2)
        await asyncio.gather(second, last)
        await connection.close()
