"""Crowds at a source's ports, and pullers that misbehave: what they cost, and that others get in beside them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import select
import socket

import pytest

from kv_transfer.transports import listener
from kv_transfer.transports.handshake import admit, connect, reach
from kv_transfer.transports.listener import ACCEPTS_A_TURN, MAX_HANDSHAKES, Listener
from pd_engine.errors import Unavailable
from support.handoffs import SECRET
from support.leaks import until
from support.transport_cases import EPOCH, TIMEOUT_S, Pair, transport_pair

Address = str | tuple[str, int]
KINDS = ("shared_memory", "tcp")
LONG_S = 1_000.0


def address_of(pair: Pair) -> Address:
    metadata = pair.source.metadata()
    return metadata["path"] if "path" in metadata else (metadata["host"], metadata["port"])


def listener_of(pair: Pair) -> Listener:
    source = pair.source
    made: Listener = getattr(source, "_listener", None) or source._port._listener  # type: ignore[attr-defined]
    return made


def stranger(address: Address) -> socket.socket:
    """Connected, or in the queue."""
    is_unix = isinstance(address, str)
    sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
    sock.connect("\0" + address if isinstance(address, str) else address)
    return sock


async def come_in(pair: Pair, token: str | None = None) -> socket.socket:
    return await connect(
        address_of(pair), secret=SECRET, epoch=EPOCH, token=token or pair.new_token(), timeout_s=TIMEOUT_S
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_crowd_takes_a_bounded_part_of_each_turn_and_of_the_places(kind: str) -> None:
    async with transport_pair(kind) as pair:
        port = listener_of(pair)
        crowd = [stranger(address_of(pair)) for _ in range(10 * ACCEPTS_A_TURN)]
        num_places = [0]
        for _ in range(20):
            await asyncio.sleep(0)
            num_places.append(len(port._handshakes))
        assert max(num_places) == MAX_HANDSHAKES
        assert max(after - before for before, after in itertools.pairwise(num_places)) <= ACCEPTS_A_TURN
        for sock in crowd:
            sock.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_puller_gets_in_beside_strangers_that_come_in_every_turn(kind: str) -> None:
    async with transport_pair(kind) as pair:
        crowd: list[socket.socket] = []

        async def come_and_stay() -> None:
            while len(crowd) < 800:
                crowd.append(stranger(address_of(pair)))
                await asyncio.sleep(0)

        coming = asyncio.create_task(come_and_stay())
        await until(lambda: len(listener_of(pair)._handshakes) == MAX_HANDSHAKES)
        for _ in range(3):
            (await come_in(pair)).close()
        coming.cancel()
        for sock in crowd:
            sock.close()


@pytest.mark.parametrize("patience_s", [0.0, LONG_S])
async def test_of_one_too_many_the_oldest_goes_if_it_has_had_its_time(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PATIENCE_S", patience_s)
    monkeypatch.setattr(listener, "HANDSHAKE_S", LONG_S)
    async with transport_pair("tcp") as pair:
        first, *crowd, last = [await speak_to(pair) for _ in range(MAX_HANDSHAKES + 1)]
        goes, stays = (first, last) if patience_s == 0 else (last, first)
        assert b"" in (await hear(goes), await hear(goes)), "the source may have spoken before"
        assert await hear(stays) != b""
        for _, writer in (first, *crowd, last):
            writer.transport.abort()


async def speak_to(pair: Pair) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    metadata = pair.source.metadata()
    return await asyncio.open_connection(metadata["host"], metadata["port"])


async def hear(stranger: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """What the source says; empty: it has hung up."""
    try:
        return await stranger[0].read(1 << 10)
    except ConnectionError:
        return b""


async def test_who_has_gone_or_speaks_first_takes_no_place() -> None:
    async with transport_pair("shared_memory") as pair:
        gone, speaks_first = stranger(address_of(pair)), stranger(address_of(pair))
        gone.close()
        speaks_first.send(b"x")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.to_thread(speaks_first.recv, 1) == b""
        assert not listener_of(pair)._pullers
        speaks_first.close()


async def test_a_puller_waits_before_a_full_queue() -> None:
    """A unix socket's connect is not under way then, although event loops take it so."""
    path = f"pd-relay-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0" + path)
        server.listen(0)
        queue = [stranger(path)]
        coming = asyncio.create_task(reach(path))
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not coming.done()
        for sock in (server.accept()[0], *queue):
            sock.close()
        with await coming as puller:
            assert puller.getpeername() == b"\0" + path.encode()


@pytest.mark.parametrize(("num_hang_ups", "timeout_s"), [(2, TIMEOUT_S), (1_000, 0.5)])
async def test_a_puller_that_was_hung_up_on_comes_again(num_hang_ups: int, timeout_s: float) -> None:
    token = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        loop = asyncio.get_running_loop()
        coming = asyncio.create_task(
            connect(server.getsockname(), secret=SECRET, epoch=EPOCH, token=token, timeout_s=timeout_s)
        )
        for _ in range(num_hang_ups):
            accepting = asyncio.create_task(loop.sock_accept(server))
            await asyncio.wait([accepting, coming], return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                accepting.cancel()
                with pytest.raises(Unavailable, match="hung up meanwhile"):
                    await coming
                return
            accepting.result()[0].close()
        puller, _ = await loop.sock_accept(server)
        with puller:
            assert await admit(puller, secret=SECRET, epoch=EPOCH, authorize=lambda token: frozenset()) == token
            (await coming).close()


@pytest.mark.parametrize("kind", ["shared_memory", "fake nixl"])
async def test_garbage_of_an_admitted_puller_ends_its_connection(kind: str) -> None:
    async with transport_pair(kind) as pair:
        with await come_in(pair) as puller:
            puller.settimeout(TIMEOUT_S)
            await asyncio.to_thread(talk_until_hung_up_on, puller)
        await until(lambda: not listener_of(pair)._pullers)


def talk_until_hung_up_on(puller: socket.socket) -> None:
    """Raises: TimeoutError: nobody hangs up."""
    with contextlib.suppress(ConnectionError):
        puller.sendall(bytes(1 << 18))
        while puller.recv(1 << 16):
            pass


@pytest.mark.parametrize("kind", ["shared_memory", "fake nixl"])
async def test_a_puller_that_resets_its_connection_is_a_line_for_debugging(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with transport_pair(kind) as pair:
        puller = await come_in(pair)
        await asyncio.to_thread(select.select, [puller], [], [])
        with caplog.at_level(logging.DEBUG, "kv_transfer"):
            puller.close()  # with unread bytes: a reset
            await until(lambda: not listener_of(pair)._pullers)
        (record,) = [one for one in caplog.records if one.name.startswith("kv_transfer")]
        assert record.levelno == logging.DEBUG
        assert record.exc_info is None


@pytest.mark.parametrize("kind", ["shared_memory", "fake nixl"])
async def test_of_too_many_pullers_with_one_token_the_oldest_goes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_A_TOKEN", 2)
    async with transport_pair(kind) as pair:
        token = pair.new_token()
        pullers = [await come_in(pair) for _ in range(2)] + [await come_in(pair, token) for _ in range(3)]
        await until(lambda: has_been_hung_up_on(pullers[2]))
        assert not any(has_been_hung_up_on(puller) for puller in (*pullers[:2], *pullers[3:]))
        for puller in pullers:
            puller.close()


@pytest.mark.parametrize("kind", ["shared_memory", "fake nixl"])
async def test_of_too_many_pullers_the_oldest_goes_of_those_whose_token_has_ended(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_PULLERS", 4)
    async with transport_pair(kind) as pair:
        token = pair.new_token()
        one = await come_in(pair)
        many = [await come_in(pair, token) for _ in range(2)]
        pair.allowed.clear()
        live = await come_in(pair)
        goes = [many[0], one, many[1]]  # of the token that most have, then the oldest
        pullers = [live, *goes]
        for puller in goes:
            pullers.append(await come_in(pair))
            await until(lambda puller=puller: has_been_hung_up_on(puller))  # type: ignore[misc]
        assert not has_been_hung_up_on(live)
        for puller in pullers:
            puller.close()


def has_been_hung_up_on(puller: socket.socket) -> bool:
    """What the source has said is read."""
    with contextlib.suppress(BlockingIOError):
        while puller.recv(1 << 16, socket.MSG_DONTWAIT):
            pass
        return True
    return False
