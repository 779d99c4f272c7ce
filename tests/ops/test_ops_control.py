"""The controller's socket: what may be asked, who may ask, and that it can always be left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from pd_engine.errors import InvalidArgument, Unavailable
from pd_engine.settings import load_settings
from pd_ops.cluster import control_client
from pd_ops.cluster import control_server as served
from pd_ops.cluster.control_messages import MAX_LINE_BYTES, DrainRequest, ScaleRequest, StatusRequest, parse_request
from pd_ops.cluster.control_server import control_server, socket_path
from pd_ops.cluster.operations import Caller, Operations
from pd_ops.commands.scale import parse_sizes
from support.leaks import assert_nothing_left


class Slow(Operations):
    """Tells that it has begun, and ends when its caller has left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.begun: list[Any] = []

    async def run(self, request: Any, caller: Caller) -> dict[str, Any]:
        self.begun.append(request)
        caller.tell("begun")
        await caller.has_left.wait()
        self.left.set()
        return {"settings": load_settings(None).model}


async def ask(address: str, line: bytes) -> list[dict[str, Any]]:
    reader, writer = await asyncio.open_unix_connection(socket_path(address))
    writer.write(line)
    writer.write_eof()
    replies: list[dict[str, Any]] = []
    with contextlib.suppress(ConnectionResetError):  # what it has not read when it ends the conversation
        while reply := await reader.readline():
            replies.append(json.loads(reply))
    writer.close()
    return replies


async def test_progress_then_a_result_and_whoever_leaves_is_noticed() -> None:
    async with assert_nothing_left():
        operations = Slow()
        async with control_server(operations) as address:
            request = ScaleRequest(decode=2, drain_s=1.0).model_dump_json().encode() + b"\n"
            for leave in (asyncio.StreamWriter.write_eof, asyncio.StreamWriter.close):
                operations.left.clear()
                reader, writer = await asyncio.open_unix_connection(socket_path(address))
                writer.write(request)
                assert json.loads(await reader.readline()) == {"progress": "begun"}
                leave(writer)
                await operations.left.wait()
                if leave is asyncio.StreamWriter.write_eof:
                    assert json.loads(await reader.readline()) == {"result": {"settings": "demo"}}
                writer.close()


async def test_a_cluster_that_stops_tells_who_waits() -> None:
    async with control_server(Slow()) as address:
        reader, writer = await asyncio.open_unix_connection(socket_path(address))
        writer.write(ScaleRequest(decode=2, drain_s=1.0).model_dump_json().encode() + b"\n")
        await reader.readline()
    assert json.loads(await reader.readline())["error"]["code"] == "unavailable"
    writer.close()


async def test_who_has_left_before_anything_was_begun_changes_nothing() -> None:
    """As where this process stood still while a command waited for it, until somebody ended the command."""
    operations = Slow()
    async with control_server(operations) as address:
        _, writer = await asyncio.open_unix_connection(socket_path(address))
        writer.write(ScaleRequest(decode=2, drain_s=1.0).model_dump_json().encode() + b"\n")
        writer.close()  # before the other side, in this loop, has read anything
        [reply] = await ask(address, b"{}\n")
        await asyncio.sleep(2 * served.LOOK_S)
    assert reply["error"]["code"] == "invalid_argument"
    assert operations.begun == []


async def test_a_controller_that_hangs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"pd-relay-test-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        listener.bind(socket_path(address))
        listener.listen()
        monkeypatch.setattr(control_client, "ready_state", lambda name: SimpleNamespace(
            control_address=address
        ))
        monkeypatch.setattr(control_client, "ANSWER_TIMEOUT_S", 0.05)
        with pytest.raises(Unavailable, match=r"did not answer in 0.05 s: it hangs"):
            await control_client.ask_controller("a", StatusRequest())


async def test_what_is_no_request_is_answered() -> None:
    async with control_server(Slow()) as address:
        for line in (b"", b"\n", b"{}\n", b"\xff\n", b"x" * (MAX_LINE_BYTES + 1) + b"\n"):
            [reply] = await ask(address, line)
            assert reply["error"]["code"] == "invalid_argument", line


async def test_another_user_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "is_own_peer", lambda connection: False)
    async with control_server(Slow()) as address:
        assert await ask(address, ScaleRequest(decode=2, drain_s=1.0).model_dump_json().encode() + b"\n") == []


@pytest.mark.parametrize(("line", "message"), [
    (b'{"command": "scale", "decode": 0, "drain_s": 1.0}', "decode"),
    (b'{"command": "scale", "decode": "2", "drain_s": 1.0}', "decode"),
    (b'{"command": "scale", "decode": 2}', "drain_s"),
    (b'{"command": "drain", "worker": "", "drain_s": 1.0}', "worker"),
    (b'{"command": "drain", "worker": "a", "drain_s": -1.0}', "drain_s"),
    (b'{"command": "drain", "worker": "a", "drain_s": 1.0, "more": 1}', "more"),
    (b'{"command": "role", "worker": "a", "role": "router", "drain_s": 1.0}', "role"),
    (b'{"command": "end"}', "the request"),
])
def test_bad_requests(line: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_request(line)


def test_a_request_is_what_was_written() -> None:
    request = DrainRequest(worker="decode-0", drain_s=2.5)
    assert parse_request(request.model_dump_json().encode()) == request


def test_sizes_on_the_command_line() -> None:
    assert parse_sizes(["decode=3", "prefill=1"]) == {"decode": 3, "prefill": 1}
    for words, message in (
        (["decode"], "got decode"), (["router=2"], "got router=2"), (["decode=0"], "1 to 1024"),
        (["decode=x"], "1 to 1024"), (["decode=99999"], "1 to 1024"), (["decode=1", "decode=2"], "twice"),
        (["decode=²"], "1 to 1024"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            parse_sizes(words)
