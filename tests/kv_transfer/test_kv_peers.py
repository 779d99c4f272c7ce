"""Channels to sources: a new life of one is reached at once, whatever became of the calls to its last."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from kv_transfer.journey import SourceInfo
from kv_transfer.peers import Link, Peers
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import InvalidArgument
from pd_engine.service.client import connect
from pd_engine.service.server import build_server
from support.leaks import until

SECRET = "a-secret-of-this-test"


async def code(peers: Peers, address: str, epoch: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peers.stub(address, epoch).SourceRenew(pb.SourceRenewRequest(), timeout=5)
    return caught.value.code()


async def test_a_restarted_source_on_its_old_address_is_reached_at_once() -> None:
    """The channel to the last life still waits before it connects again; calls over it fail meanwhile."""
    place = socket.socket()  # nobody else gets the port meanwhile, and nobody listens there
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    port = place.getsockname()[1]
    address = f"127.0.0.1:{port}"
    peers = Peers([], lambda there: connect(there, SECRET), "host", time.monotonic)
    server = build_server(secret=SECRET)
    try:
        for _ in range(4):  # each failure makes the next wait longer
            assert await code(peers, address, "a" * 32) is grpc.StatusCode.UNAVAILABLE
        assert server.add_insecure_port(address) == port
        await server.start()
        assert await code(peers, address, "b" * 32) is grpc.StatusCode.UNIMPLEMENTED
    finally:
        place.close()
        await peers.close()
        await server.stop(0)


async def test_a_channel_that_is_used_is_not_swept() -> None:
    """A manifest may be read for as long as a prompt takes, with no other call meanwhile."""
    now_s = [0.0]
    closed: list[str] = []

    def open_channel(address: str) -> grpc.aio.Channel:
        channel = connect(address, SECRET)
        right = channel.close

        async def close(grace: float | None = None) -> None:
            closed.append(address)
            await right(grace)

        channel.close = close  # type: ignore[method-assign]
        return channel

    peers = Peers([], open_channel, "host", lambda: now_s[0])
    peers.stub("127.0.0.1:1", "a" * 32)
    peers.stub("127.0.0.1:2", "b" * 32)
    link = Link(cast(Any, Connected()), cast(Any, None), 1, 0.0, num_pulls=1)
    peers._links["a" * 32, "loopback"] = link
    now_s[0] = 1_000.0
    await peers.sweep()
    assert closed == ["127.0.0.1:2"]
    peers.release(link)
    now_s[0] = 2_000.0
    await peers.sweep()
    assert closed == ["127.0.0.1:2", "127.0.0.1:1"]
    await peers.close()


class Connected:
    """Closes when it is let."""

    def __init__(self) -> None:
        self.usable = True
        self.closed = False
        self.may_close = asyncio.Event()
        self.may_close.set()

    async def close(self) -> None:
        await self.may_close.wait()
        self.closed = True


class Connects:
    """A transport whose connections take until `may_connect`."""

    name = "tcp"
    capabilities = SimpleNamespace(across_hosts=True)

    def __init__(self) -> None:
        self.made: list[Connected] = []
        self.may_connect = asyncio.Event()
        self.may_connect.set()

    async def connect(self, *_: Any, **__: Any) -> Connected:
        await self.may_connect.wait()
        self.made.append(Connected())
        return self.made[-1]

    async def close(self) -> None: ...


def opening(num_arena_blocks: int = 8) -> Any:
    return SimpleNamespace(
        host_id="host", transports={"tcp": {}}, worker_id="prefill-0", num_arena_blocks=num_arena_blocks
    )


def source(letter: str) -> SourceInfo:
    return SourceInfo(address="127.0.0.1:1", epoch=letter * 32, token="c" * 32)


@pytest.mark.parametrize("reconnects_first", [True, False])
async def test_a_link_that_is_opened_again_during_a_sweep_is_left_alone(reconnects_first: bool) -> None:
    """Two connections break, as in a cut; while the first is being closed a pull wants the second."""
    transport = Connects()
    peers = Peers([cast(Any, transport)], lambda address: connect(address, SECRET), "host", time.monotonic)
    for letter in "ab":
        peers.release(await peers.acquire(source(letter), opening(), 1.0))
    first, second = transport.made
    first.usable = second.usable = False
    first.may_close.clear()
    sweep = asyncio.create_task(peers.sweep())
    await asyncio.sleep(0)
    if not reconnects_first:
        transport.may_connect.clear()
    pull = asyncio.create_task(peers.acquire(source("b"), opening(), 1.0))
    await until(lambda: second.closed)
    if reconnects_first:
        await pull
    first.may_close.set()
    await sweep
    transport.may_connect.set()
    link = await pull
    assert not transport.made[2].closed
    assert (link.num_pulls, len(transport.made)) == (1, 3)
    peers.release(link)
    await peers.close()
    assert all(connection.closed for connection in transport.made)
    assert not peers._turns


async def test_one_source_has_one_arena() -> None:
    """Whatever a later manifest says: the connection is to what the first one said."""
    peers = Peers([cast(Any, Connects())], lambda address: connect(address, SECRET), "host", time.monotonic)
    peers.release(await peers.acquire(source("a"), opening(), 1.0))
    with pytest.raises(InvalidArgument, match="num_arena_blocks of prefill-0 must be 8"):
        await peers.acquire(source("a"), opening(9), 1.0)
    peers.release(await peers.acquire(source("a"), opening(), 1.0))
    await peers.close()
