"""What every transport must do. Each test runs on each of them; on nixl with a double of its library, and with the real
one where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kv_transfer.transport import ChecksumAt, Connection, Metadata
from kv_transfer.transports.handshake import Verdict
from pd_engine.cache.layout import CacheLayout, Component, ComponentKind
from pd_engine.errors import Gone, InvalidArgument, PdRelayError, Unauthenticated, Unavailable
from pd_kernels.block_checksum.reference import checksum
from support.leaks import assert_nothing_left, until
from support.transport_cases import TIMEOUT_S, TRANSPORTS, Pair, transport_pair

AUTHENTICATED = tuple(name for name in TRANSPORTS if name != "loopback")  # that one never leaves the process
BIG = CacheLayout(
    block_size=16,
    components=tuple(
        Component(name=f"layers.{index}", kind=ComponentKind.PAGED, width=1024, dtype="fp32") for index in range(4)
    ),
)


@pytest.fixture(params=TRANSPORTS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    # pytest still refers to the arenas
    async with assert_nothing_left(except_files="memfd"), transport_pair(request.param) as made:
        yield made


@pytest.fixture
async def connection(pair: Pair) -> AsyncIterator[Connection]:
    made = await pair.connect()
    yield made
    await made.close()


async def test_exactly_the_ranges_are_written(pair: Pair, connection: Connection) -> None:
    last_source, last = pair.source_arena.num_blocks - 1, pair.arena.num_blocks - 1
    spans = pair.spans([(0, 3, 5, 0, 16), (1, 3, 5, 0, 16), (2, 0, 0, 15, 1), (2, last_source, last, 4, 12)])
    expected = pair.expected(spans)
    await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert bytes(pair.arena.buffer) == expected


async def test_generations_are_those_of_the_source(pair: Pair, connection: Connection) -> None:
    for _ in range(3):
        pair.source_arena.renew(7)
    spans = pair.spans([(0, 7, 1, 0, 16), (0, 8, 2, 0, 16)])
    fetched = await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert fetched.generations_before.tolist() == [3, 0]
    assert fetched.generations_after.tolist() == [3, 0]


async def test_checksums_are_of_what_was_written(pair: Pair, connection: Connection) -> None:
    """Taken by the transport, where it says so, or left to its user."""
    spans = pair.spans([(c, block, block + 7, 0, 16) for c in range(3) for block in range(24)] + [(0, 3, 1, 5, 7)])
    fetched = await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    if pair.pull.capabilities.checksum_at is ChecksumAt.ARENA:
        assert fetched.checksums is None
    else:
        assert fetched.checksums is not None
        assert fetched.checksums.tolist() == [
            checksum(pair.arena.buffer[start : start + length])
            for start, length in zip(spans.offsets.tolist(), spans.lengths.tolist(), strict=True)
        ]


async def test_one_byte_ranges_and_one_range(pair: Pair, connection: Connection) -> None:
    spans = pair.spans([(1, 2, 9, 0, 1)])
    one = type(spans)(
        block_ids=spans.block_ids, source_offsets=spans.source_offsets + 17, offsets=spans.offsets + 17,
        lengths=np.array([1], dtype=np.int64),
    )
    expected = pair.expected(one)
    await connection.fetch(one, token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert bytes(pair.arena.buffer) == expected


async def test_more_ranges_than_one_system_call_takes(pair: Pair, connection: Connection) -> None:
    pieces = [
        (component, block, block + 16, slot, 1)
        for component in range(3) for block in range(24) for slot in range(0, 16)
    ]
    assert len(pieces) > 1024
    spans = pair.spans(pieces)
    expected = pair.expected(spans)
    await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert bytes(pair.arena.buffer) == expected


async def test_many_fetches_at_once(pair: Pair, connection: Connection) -> None:
    fetches = [pair.spans([(c, block, block + 3, 0, 16) for c in range(3)]) for block in range(24)]
    image = pair.expected(pair.spans([(c, block, block + 3, 0, 16) for c in range(3) for block in range(24)]))
    token = pair.new_token()
    await asyncio.gather(*(connection.fetch(spans, token=token, timeout_s=TIMEOUT_S) for spans in fetches))
    assert bytes(pair.arena.buffer) == image


async def test_two_connections_at_once(pair: Pair, connection: Connection) -> None:
    other = await pair.connect()
    both = [pair.spans([(0, 1, 1, 0, 16)]), pair.spans([(0, 2, 2, 0, 16)])]
    image = pair.expected(pair.spans([(0, 1, 1, 0, 16), (0, 2, 2, 0, 16)]))
    await asyncio.gather(
        connection.fetch(both[0], token=pair.new_token(), timeout_s=TIMEOUT_S),
        other.fetch(both[1], token=pair.new_token(), timeout_s=TIMEOUT_S),
    )
    await other.close()
    assert bytes(pair.arena.buffer) == image


async def test_a_token_that_is_not_valid_opens_nothing(pair: Pair) -> None:
    with pytest.raises(Gone):
        await pair.connect("0" * 32)


async def test_another_epoch_is_gone(pair: Pair) -> None:
    with pytest.raises(Gone):
        await pair.connect(epoch="f" * 32)


async def test_a_token_opens_only_its_blocks(pair: Pair, connection: Connection) -> None:
    if pair.pull.capabilities.one_sided:
        pytest.skip("who may map the arena can read all of it: tokens guard against error there, at connection")
    before = bytes(pair.arena.buffer)
    with pytest.raises(Gone):
        await connection.fetch(
            pair.spans([(0, 4, 1, 0, 16), (0, 5, 2, 0, 16)]), token=pair.new_token(frozenset({4})), timeout_s=TIMEOUT_S
        )
    assert bytes(pair.arena.buffer) == before
    spans = pair.spans([(0, 4, 1, 0, 16)])
    expected = pair.expected(spans)
    await connection.fetch(spans, token=pair.new_token(frozenset({4})), timeout_s=TIMEOUT_S)
    assert bytes(pair.arena.buffer) == expected


@pytest.mark.parametrize("name", AUTHENTICATED)
async def test_who_does_not_know_the_secret_gets_nothing(name: str) -> None:
    async with transport_pair(name) as pair:
        stranger = pair.make_pull("another-secret-altogether")
        with pytest.raises(Unauthenticated):
            await stranger.connect(
                pair.source.metadata(), epoch="e" * 32, token=pair.new_token(), num_blocks=24, timeout_s=TIMEOUT_S
            )
        await stranger.close()
        await (await pair.connect()).close()


@pytest.mark.parametrize("name", AUTHENTICATED)
async def test_strangers_get_nothing_and_cost_nothing(name: str) -> None:
    """Who connects and says nothing, or anything, is told a nonce and no more, keeps nobody out, and is hung up on."""
    async with assert_nothing_left(except_files="memfd"):
        async with transport_pair(name) as pair:
            metadata = pair.source.metadata()
            strangers = [await call_on(metadata) for _ in range(100)]
            for number, (_, writer) in enumerate(strangers):
                writer.write(bytes(64 * (number % 3)))  # silent, half of a proof, a proof that is wrong
            connection = await pair.connect()
            spans = pair.spans([(0, 4, 1, 0, 16)])
            expected = pair.expected(spans)
            await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
            assert bytes(pair.arena.buffer) == expected
            told = [await heard_from(reader) for reader, _ in strangers]
            assert all(len(words) in (0, 40, 73) for words in told), "a magic word and a nonce, then at most a refusal"
            refusals = [words[40:] for words in told if len(words) > 40]
            assert all(words == bytes([Verdict.UNAUTHENTICATED]) + bytes(32) for words in refusals)
            for _, writer in strangers:
                writer.transport.abort()
            await connection.close()
        del strangers, writer, connection


async def call_on(metadata: Metadata) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if "path" in metadata:
        return await asyncio.open_unix_connection("\0" + metadata["path"])
    return await asyncio.open_connection(metadata["host"], metadata["port"])


async def heard_from(reader: asyncio.StreamReader) -> bytes:
    """All that a source says until it hangs up."""
    try:
        return await reader.read()
    except OSError:
        return b""


@pytest.mark.parametrize("metadata", [
    {}, {"path": 7}, {"host": "", "port": 0}, {"address": b"x"}, {"more": 1}, {"host": "a..b", "port": 9},
    {"host": "a\0b", "port": 9}, {"host": "localhost", "port": 9},
])
async def test_malformed_metadata_are_refused(pair: Pair, metadata: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        await pair.pull.connect(metadata, epoch="e" * 32, token=pair.new_token(), num_blocks=24, timeout_s=TIMEOUT_S)


async def test_nobody_at_the_address_is_unavailable(pair: Pair) -> None:
    await pair.source.stop()
    with pytest.raises(Unavailable):
        await pair.connect()


async def test_a_source_that_is_not_what_it_says_is_refused(pair: Pair) -> None:
    if pair.pull.name in ("tcp", "nccl"):
        pytest.skip("the source checks each range itself")
    with pytest.raises(InvalidArgument):
        await pair.pull.connect(
            pair.source.metadata(), epoch="e" * 32, token=pair.new_token(), num_blocks=25, timeout_s=TIMEOUT_S
        )


async def test_a_source_that_ends_is_noticed(pair: Pair, connection: Connection) -> None:
    assert connection.usable
    await pair.source.stop()
    if pair.pull.name == "shared_memory":  # what is mapped stays readable
        await until(lambda: not connection.usable)
        spans = pair.spans([(0, 4, 1, 0, 16)])
        expected = pair.expected(spans)
        await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
        assert bytes(pair.arena.buffer) == expected
    else:
        with pytest.raises(Unavailable):
            await connection.fetch(pair.spans([(0, 4, 1, 0, 16)]), token=pair.new_token(), timeout_s=TIMEOUT_S)
        assert not connection.usable


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_after_quiesce_a_cancelled_fetch_writes_nothing(name: str) -> None:
    async with transport_pair(name, layout=BIG, num_source_blocks=48, num_blocks=48) as pair:
        connection = await pair.connect()
        spans = pair.spans([(c, block, block, 0, 16) for c in range(4) for block in range(48)])
        for num_turns in (0, 1, 3, 10, 30):
            fetch = asyncio.create_task(connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            fetch.cancel()
            await asyncio.wait([fetch])
            await connection.quiesce()
            pair.arena.buffer[pair.arena.offsets[0] :] = bytes(pair.arena.num_bytes - pair.arena.offsets[0])
            again = pair.spans([(0, 0, 0, 0, 1)])
            expected = pair.expected(again)
            if connection.usable:
                await connection.fetch(again, token=pair.new_token(), timeout_s=TIMEOUT_S)
                assert bytes(pair.arena.buffer) == expected
        await connection.close()


async def test_a_cancelled_fetch_costs_others_nothing(
    pair: Pair, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given up ends by itself; a busy machine may take its time over it."""
    monkeypatch.setattr("kv_transfer.transports.interest.DRAIN_S", TIMEOUT_S)
    token = pair.new_token()
    fetches = [
        asyncio.create_task(
            connection.fetch(pair.spans([(c, block, block, 0, 16) for c in range(3)]), token=token, timeout_s=TIMEOUT_S)
        )
        for block in range(24)
    ]
    await asyncio.sleep(0)
    for fetch in fetches[::2]:
        fetch.cancel()
    ends = await asyncio.gather(*fetches, return_exceptions=True)
    await connection.quiesce()
    assert not [end for end in ends if isinstance(end, PdRelayError)]
    for block in range(1, 24, 2):
        assert bytes(pair.arena.piece(0, block)) == bytes(pair.source_arena.piece(0, block))


async def test_what_a_transport_declares(pair: Pair) -> None:
    capabilities = pair.pull.capabilities
    assert pair.pull.name == pair.source.name
    assert 0 < capabilities.ending_ms <= 5_000
    assert capabilities.device_memory == (pair.pull.name == "nccl")


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_nothing_is_left_behind(name: str) -> None:
    async with assert_nothing_left():
        await _use(name)


async def _use(name: str) -> None:
    async with transport_pair(name) as pair:
        connection = await pair.connect()
        await connection.fetch(pair.spans([(0, 1, 2, 0, 16)]), token=pair.new_token(), timeout_s=TIMEOUT_S)
        cancelled = asyncio.create_task(
            connection.fetch(pair.spans([(0, 1, 2, 0, 16)]), token=pair.new_token(), timeout_s=TIMEOUT_S)
        )
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await connection.close()


async def test_a_closed_connection_fetches_nothing(pair: Pair) -> None:
    """Whoever still has it is told so, in words, and nothing is opened anew."""
    connection = await pair.connect()
    before = bytes(pair.arena.buffer)
    await connection.close()
    with pytest.raises(Unavailable):
        await connection.fetch(pair.spans([(0, 1, 2, 0, 16)]), token=pair.new_token(), timeout_s=TIMEOUT_S)
    assert bytes(pair.arena.buffer) == before


async def test_a_close_that_is_cancelled_goes_on(pair: Pair) -> None:
    async def connect_and_fetch() -> Connection:
        connection = await pair.connect()
        spans = pair.spans([(0, 1, 1, 0, 16)])
        await connection.fetch(spans, token=pair.new_token(), timeout_s=TIMEOUT_S)
        return connection

    await (await connect_and_fetch()).close()  # what the transport itself keeps is there
    connections = []  # not the collector's
    async with assert_nothing_left(except_files="memfd"):
        for num_turns in range(1, 4):
            connections.append(await connect_and_fetch())
            closing = asyncio.create_task(connections[-1].close())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
