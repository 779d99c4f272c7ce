"""Channels to sources: a new life of one is reached at once, whatever became of the calls to its last."""

from __future__ import annotations

import socket
import time

import grpc.aio
import pytest

from kv_transfer.peers import Peers
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
