"""Where commands reach the controller of a running cluster: a socket on its host, for its own user alone.

The socket has a name in Linux's abstract namespace, which stands in the cluster's state file; the kernel says who
connects, and nobody else's process is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Literal

from pd_engine.errors import Cancelled, Internal, InvalidArgument, PdRelayError, Unavailable
from pd_ops.cluster.control_messages import MAX_LINE_BYTES, QUESTIONS, parse_request
from pd_ops.cluster.operations import Caller, Operations

REQUEST_TIMEOUT_S = 10.0
LOOK_S = 0.05
_PEER = struct.Struct("3i")  # Linux's struct ucred: pid, uid, gid

log = logging.getLogger(__name__)


def socket_path(address: str) -> str:
    """As the operating system takes it."""
    return "\0" + address


def is_own_peer(connection: socket.socket) -> bool:
    """Whether a process of this user, or root's, is at the other end."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (os.getuid(), 0)


@contextlib.asynccontextmanager
async def control_server(operations: Operations) -> AsyncIterator[str]:
    """Its address, for the time of the context; what is under way at the end is cancelled, and its caller told."""
    address = f"pd-relay-{secrets.token_hex(16)}"
    conversations: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        conversations.add(task)
        try:
            await _Conversation(reader, writer, operations).run()
        finally:
            conversations.discard(task)

    server = await asyncio.start_unix_server(converse, socket_path(address), limit=MAX_LINE_BYTES)
    try:
        yield address
    finally:
        server.close()
        ended = list(conversations)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


class _Conversation:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, operations: Operations) -> None:
        self._reader = reader
        self._writer = writer
        self._operations = operations

    async def run(self) -> None:
        try:
            if is_own_peer(self._writer.get_extra_info("socket")):
                await self._answer()
        except (ConnectionError, TimeoutError):
            log.info("a command has gone away")
        finally:
            self._writer.close()

    async def _answer(self) -> None:
        try:
            self._send("result", await self._result())
        except asyncio.CancelledError:
            self._send_error(Unavailable("the cluster is stopping"))
            raise
        except PdRelayError as error:
            self._send_error(error)
        except Exception as error:  # the process boundary
            log.exception("unexpected error")
            self._send_error(Internal(f"{type(error).__name__}: {error}"))
        await self._writer.drain()

    async def _result(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                line = await self._reader.readline()
        except ValueError:
            raise InvalidArgument(f"a request has at most {MAX_LINE_BYTES} bytes") from None
        request = parse_request(line)
        caller = Caller(lambda sentence: self._send("progress", sentence))
        leaving = asyncio.create_task(self._watch(caller))
        try:
            if not isinstance(request, QUESTIONS):
                await self._check_there(leaving)
            return await self._operations.run(request, caller)
        finally:
            leaving.cancel()

    async def _check_there(self, leaving: asyncio.Task[None]) -> None:
        """A request may have lain here for long while this process, or its host, stood still.

        Raises:
            Cancelled: its sender has left meanwhile.
        """
        done, _ = await asyncio.wait({leaving}, timeout=LOOK_S)
        if done:
            raise Cancelled("the command has left before anything was begun")

    async def _watch(self, caller: Caller) -> None:
        """A caller says nothing more; the end of what it sends is its leaving."""
        with contextlib.suppress(ConnectionError):
            await self._reader.read(1)
        caller.has_left.set()

    def _send_error(self, error: PdRelayError) -> None:
        self._send("error", {"code": error.code.value, "message": error.message})

    def _send(self, kind: Literal["progress", "result", "error"], value: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps({kind: value}).encode() + b"\n")
