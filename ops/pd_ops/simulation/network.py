"""The network between simulated processes: connections with keepalive, as gRPC has them, whose messages take a while.

A cut holds messages back. When it lasts longer than a keepalive does, the connection is broken: its calls fail at the
client's end with UNAVAILABLE and are cancelled at the server's. A process that is killed breaks its connections at
once; one that is stopped breaks them at the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from pd_ops.simulation.loop import VirtualLoop
from pd_ops.simulation.process import Process

CLIENT_KEEPALIVE_S = 2.0
SERVER_KEEPALIVE_S = 4.0

Metadata = tuple[tuple[str, str], ...]


class Call(Protocol):
    """One call, as what carries and answers it sees it.

    Attributes:
        number: of all calls of the network.
        path, data, metadata: what was sent; `method` is the path's last name, as "Reserve".
        task: of the handler, at the server; None before it has arrived and after it is done.
    """

    number: int
    path: str
    data: bytes
    metadata: Metadata
    is_stream: bool
    client: Process
    connection: Connection | None
    task: asyncio.Task[None] | None

    @property
    def method(self) -> str: ...

    def send(self, data: bytes) -> None:
        """A reply of the server."""

    def end(self, code: grpc.StatusCode, details: str, metadata: Metadata) -> None:
        """The handler is done. OK: all replies are sent."""

    def broken_at_client(self) -> None: ...

    def broken_at_server(self) -> None: ...


class Listener(Protocol):
    """A server, as what carries calls to it sees it."""

    process: Process

    def serve(self, call: Call) -> None:
        """A call has arrived."""

    def serve_again(self, call: Call) -> None:
        """It has arrived once more; nobody waits for what comes of it."""


class Weather(Protocol):
    """How the network behaves just now."""

    def latency_s(self, sender: Process, receiver: Process) -> float:
        """Of one message."""

    def duplicate_after_s(self, call: Call) -> float | None:
        """A call arrives again, so long after; None: only once."""

    def loses_reply(self, call: Call) -> bool:
        """The call is done, and its caller is told that the connection was lost."""

    def survives_its_caller(self, call: Call) -> bool:
        """A call that its caller has given up is done all the same, as it was under way already."""


@dataclass(kw_only=True, slots=True, eq=False)
class Connection:
    """Between one life of a client and one of a server.

    Attributes:
        client_open, server_open: as either end sees it.
        held: messages that wait for the end of a cut, with their receivers.
        calls: that go on, by number.
    """

    client: Process
    server: Process
    client_open: bool = True
    server_open: bool = True
    held: list[tuple[Process, Callable[[], None]]] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)

    def other(self, process: Process) -> Process:
        return self.server if process is self.client else self.client


class Network:
    """Attributes:
    servers: by address, that listen now.
    """

    def __init__(self, loop: VirtualLoop, weather: Weather) -> None:
        self.loop = loop
        self.weather = weather
        self.servers: dict[str, Listener] = {}
        self._connections: dict[tuple[Process, Process], Connection] = {}  # by client and server
        self._cuts: dict[frozenset[str], int] = {}  # by names; how many times over
        self._num_cuts = 0
        self._num_calls = 0

    def next_call_number(self) -> int:
        self._num_calls += 1
        return self._num_calls

    # Connections

    def connect(self, client: Process, address: str) -> Connection | None:
        """The connection to whoever listens there; None: nobody does."""
        server = self.servers.get(address)
        if server is None or not server.process.is_alive:
            return None
        key = (client, server.process)
        connection = self._connections.get(key)
        if connection is None or not connection.client_open:
            connection = self._connections[key] = Connection(client=client, server=server.process)
            self._watch(connection)
        return connection

    def carry(
        self, connection: Connection, receiver: Process, action: Callable[[], None], *, not_before_s: float = 0.0
    ) -> float:
        """Runs `action` as a part of the receiver when the message arrives. Returns when that is, unless it is held."""
        sender = connection.other(receiver)
        arrival_s = max(not_before_s, self.loop.now_s + self.weather.latency_s(sender, receiver))
        self._at(arrival_s, receiver, lambda: self._arrive(connection, receiver, action))
        return arrival_s

    def _arrive(self, connection: Connection, receiver: Process, action: Callable[[], None]) -> None:
        is_open = connection.client_open if receiver is connection.client else connection.server_open
        if not is_open:
            return
        if self.is_cut(connection.client, connection.server):
            connection.held.append((receiver, action))
        else:
            action()

    # Cuts, stops and deaths

    def is_cut(self, one: Process, other: Process) -> bool:
        return frozenset({one.name, other.name}) in self._cuts

    def cut(self, one: str, other: str) -> None:
        pair = frozenset({one, other})
        self._num_cuts += 1
        self._cuts[pair] = self._num_cuts
        for connection in self._between(pair):
            self._watch(connection)

    def heal(self, one: str, other: str) -> None:
        pair = frozenset({one, other})
        self._cuts.pop(pair, None)
        for connection in self._between(pair):
            if not (connection.client_open and connection.server_open):
                self._break_client(connection)
                self._break_server(connection)
            held, connection.held = connection.held, []
            for receiver, action in held:
                self.carry(connection, receiver, action)

    def stopped(self, process: Process) -> None:
        """It does not answer keepalives any more."""
        for connection in [c for c in self._connections.values() if process in (c.client, c.server)]:
            self._watch(connection)

    def died(self, process: Process) -> None:
        """Its host ends its connections."""
        for address in [address for address, server in self.servers.items() if server.process is process]:
            del self.servers[address]
        for connection in [c for c in self._connections.values() if process in (c.client, c.server)]:
            connection.client_open &= connection.client is not process
            connection.server_open &= connection.server is not process
            if not self.is_cut(connection.client, connection.server):
                self._break_soon(connection, connection.other(process))
            else:
                self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Breaks a connection whose other end is silent for the time of a keepalive, at either end."""
        for observer, keepalive_s in (
            (connection.client, CLIENT_KEEPALIVE_S), (connection.server, SERVER_KEEPALIVE_S)
        ):
            if self._is_silent(connection, observer):
                number = self._cut_number(connection)
                self.loop.call_at_world(
                    self.loop.now_s + keepalive_s, self._check_silence, connection, observer, number
                )

    def _check_silence(self, connection: Connection, observer: Process, cut_number: int) -> None:
        if self._is_silent(connection, observer) and cut_number == self._cut_number(connection):
            self._break_soon(connection, observer)

    def _is_silent(self, connection: Connection, observer: Process) -> bool:
        other = connection.other(observer)
        return other.is_stopped or not other.is_alive or self.is_cut(observer, other)

    def _cut_number(self, connection: Connection) -> int:
        return self._cuts.get(frozenset({connection.client.name, connection.server.name}), 0)

    def _break_soon(self, connection: Connection, observer: Process) -> None:
        breaks = self._break_client if observer is connection.client else self._break_server
        self._at(self.loop.now_s + 0.001, observer, lambda: breaks(connection))
        if not self.is_cut(connection.client, connection.server):  # the other end is told
            other = connection.other(observer)
            also = self._break_server if observer is connection.client else self._break_client
            self._at(self.loop.now_s + 0.002, other, lambda: also(connection))

    def _break_client(self, connection: Connection) -> None:
        if connection.client_open:
            connection.client_open = False
            for call in list(connection.calls.values()):
                call.broken_at_client()
        self._forget(connection)

    def _break_server(self, connection: Connection) -> None:
        if connection.server_open:
            connection.server_open = False
            for call in list(connection.calls.values()):
                call.broken_at_server()
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        if connection.client_open or connection.server_open:
            return
        key = (connection.client, connection.server)
        if self._connections.get(key) is connection:
            del self._connections[key]

    def _between(self, pair: frozenset[str]) -> list[Connection]:
        return [c for c in self._connections.values() if frozenset({c.client.name, c.server.name}) == pair]

    def _at(self, when_s: float, process: Process, action: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_at_world(when_s, action, context=process.context())
