"""Channels to sources: a new life of one is reached at once, whatever became of the calls to its last."""

from __future__ import annotations

import socket
import time
from typing import Any, cast

import grpc.aio
import pytest

from kv_transfer.peers import Link, Peers
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.service.client import connect
from pd_engine.service.server import build_server

SECRET = "a-secret-of-this-test"


async def code(peers: Peers, address: str, epoch: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await peers.stub(address, epoch).SourceRenew(pb.SourceRenewRequest(), timeout=5)
    return caught.value.code()


async def test_a_restarted_source_on_its_old_address_is_reached_at_once() -> None:
    """The channel to the last life still waits before it connects again; calls over it fail meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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
    link = Link(cast(Any, Connected()), cast(Any, None), 0.0, num_pulls=1)
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
    usable = True

    async def close(self) -> None: ...
