"""A source that says over gRPC whatever it likes: the pull ends with a typed error, and nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest

from kv_transfer.journey import SourceInfo
from kv_transfer.manifest import PIECE_RECORD, Closing, Failed, Opening, Part, Pieces
from kv_transfer.manifest_wire import pack_part
from kv_transfer.peers import Peers
from kv_transfer.transports.loopback import FaultPlan, LoopbackNetwork, LoopbackPull, LoopbackSource
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import ErrorCode, PdRelayError
from pd_engine.sequence import FinishReason
from pd_engine.service.server import bind, build_server
from pd_engine.settings import TransferSettings
from support.handoffs import LAYOUT, SECRET, DestinationSide, SourceSide, closing_for, new_key, running
from support.leaks import assert_nothing_left, assert_pool_is_free, until

LONG = TransferSettings(lease_ms=60_000, fetch_timeout_ms=5_000, max_refetches=1)
NUM_TOKENS = 40  # three blocks


@dataclass(frozen=True)
class Abort:
    """Ends the stream with this status."""

    code: grpc.StatusCode


Say = Callable[[Opening], "list[Part | bytes | Abort]"]


def pieces(*records: tuple[int, int, int, int, int, int]) -> Pieces:
    return Pieces(np.array(list(records), dtype=PIECE_RECORD))


class HostileSource(worker_pb2_grpc.KvSourceServicer):
    """Says these parts on every call, and vouches for itself for ever."""

    def __init__(self, parts: list[Part | bytes | Abort]) -> None:
        self.parts = parts

    async def Manifest(
        self, request: pb.ManifestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ManifestPart]:
        for part in self.parts:
            if isinstance(part, Abort):
                await context.abort(part.code, "as it likes")
            yield pb.ManifestPart(part=part if isinstance(part, bytes) else pack_part(part))

    async def SourceRenew(self, request: pb.SourceRenewRequest, context: object) -> pb.SourceRenewReply:
        return pb.SourceRenewReply(state="running")

    async def Commit(self, request: pb.CommitRequest, context: object) -> pb.CommitReply:
        return pb.CommitReply()


class Lab:
    """A hostile manifest before the arena of an honest transport."""

    def __init__(self, settings: TransferSettings = LONG) -> None:
        self.network = LoopbackNetwork()
        self.source = SourceSide(settings=settings, transports=[LoopbackSource(self.network)])
        self.destination = DestinationSide(
            settings=settings, make_transports=lambda arena: [LoopbackPull(self.network, arena, FaultPlan())]
        )
        self.hostile = HostileSource([])
        self.server = build_server(secret=SECRET)
        worker_pb2_grpc.add_KvSourceServicer_to_server(self.hostile, self.server)
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', 0)}"

    async def pull(self, say: Say) -> PdRelayError:
        """What a pull fails with, long before its lease ends.

        Args:
            say: from the opening of a handoff that is live at the honest source.
        """
        key = new_key()
        info = self.source.begin(key, NUM_TOKENS)
        handoff = self.source.source._book.by_token(info.token)
        assert handoff is not None
        self.hostile.parts = say(self.source.source.opening(handoff))
        self.destination.reserve_and_pull(
            key, NUM_TOKENS, SourceInfo(address=self.address, epoch=info.epoch, token=info.token)
        )
        async with asyncio.timeout(30):
            await self.destination.end_of(key)
        self.source.source.release(key.journey_id, 1)
        error, _ = self.destination.failed[key]
        self.destination.destination.release(key.journey_id, 1)
        await until(lambda: self.destination.destination.num_quarantined == 0)
        assert_pool_is_free(self.destination.pool)
        return error


@asynccontextmanager
async def started(settings: TransferSettings = LONG) -> AsyncIterator[Lab]:
    """At the end nothing may be left anywhere."""
    lab = Lab(settings)
    async with assert_nothing_left():
        await lab.server.start()
        async with running(lab.source, lab.destination):
            yield lab
            assert_pool_is_free(lab.source.pool)
            assert_pool_is_free(lab.destination.pool)
        await lab.server.stop(0)


LIST_BOMB = msgpack.packb({  # type: ignore[no-untyped-call]
    "part": "opening", "transports": {str(number): {} for number in range(17)}
})


@pytest.mark.parametrize("code", [
    grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN,
])
@pytest.mark.parametrize("is_open", [False, True])
async def test_a_stream_that_ends_before_its_end(code: grpc.StatusCode, is_open: bool) -> None:
    """However it ends, and although the source goes on to vouch for the handoff."""
    end = [] if code is grpc.StatusCode.OK else [Abort(code)]
    async with started() as lab:
        error = await lab.pull(lambda opened: [*([opened] if is_open else []), *end])
        assert error.code in (ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.CANCELLED)


@pytest.mark.parametrize(("say", "code"), [
    (lambda opened: [b""], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [b"\xc1" * 100], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [bytes((1 << 20) + 1)], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [LIST_BOMB], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [pieces((0, 0, 0, 16, 0, 0))], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [closing_for(NUM_TOKENS)], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [Failed(code=ErrorCode.DATA_LOSS, message="x" * 1_000)], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [opened, opened], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [opened, Failed(code=ErrorCode.RESOURCE_EXHAUSTED, message="")], ErrorCode.RESOURCE_EXHAUSTED),
    (lambda opened: [replace(opened, epoch="b" * 32)], ErrorCode.GONE),
    (lambda opened: [replace(opened, fingerprint="b" * 16)], ErrorCode.FAILED_PRECONDITION),
    (lambda opened: [replace(opened, checksums=False)], ErrorCode.FAILED_PRECONDITION),
    (lambda opened: [replace(opened, host_id="elsewhere")], ErrorCode.FAILED_PRECONDITION),
    (lambda opened: [replace(opened, transports={})], ErrorCode.FAILED_PRECONDITION),
    (lambda opened: [replace(opened, transports={"loopback": {"address": "nowhere"}})], ErrorCode.UNAVAILABLE),
    (lambda opened: [replace(opened, transports={"loopback": {"path": "nowhere"}})], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [replace(opened, num_arena_blocks=1 << 31)], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [replace(opened, num_tokens=39)], ErrorCode.INVALID_ARGUMENT),
    (lambda opened: [replace(opened, num_held_blocks=1)], ErrorCode.INVALID_ARGUMENT),
])
async def test_what_it_says_first(say: Say, code: ErrorCode) -> None:
    async with started() as lab:
        assert (await lab.pull(say)).code is code


FULL, TAIL = 16, NUM_TOKENS % 16
ALL = [(c, b, b, FULL if b < 2 else TAIL, 0, 0) for c in range(3) for b in range(3)]


@pytest.mark.parametrize(("records", "code", "says"), [
    ([(3, 0, 0, FULL, 0, 0)], ErrorCode.INVALID_ARGUMENT, "component"),
    ([(0, 3, 0, FULL, 0, 0)], ErrorCode.INVALID_ARGUMENT, "block"),
    ([(0, 0, 64, FULL, 0, 0)], ErrorCode.INVALID_ARGUMENT, "block_id"),
    ([(0, 0, 0, FULL + 1, 0, 0)], ErrorCode.INVALID_ARGUMENT, "num_valid"),
    ([(0, 2, 0, FULL, 0, 0)], ErrorCode.INVALID_ARGUMENT, "num_valid"),
    ([(0, 0, 0, 0, 0, 0)], ErrorCode.INVALID_ARGUMENT, "num_valid"),
    ([(0, 0, 0, FULL, 0, 0), (0, 1, 0, FULL, 0, 0)], ErrorCode.INVALID_ARGUMENT, "two blocks"),
    ([(0, 0, 0, FULL, 0, 0), (0, 0, 0, FULL, 0, 0)], ErrorCode.INVALID_ARGUMENT, "twice"),
    ([(0, 0, 0, FULL, 0, 0), (1, 0, 1, FULL, 0, 0)], ErrorCode.INVALID_ARGUMENT, "the same"),
    ([(0, 0, 0, FULL, 2**64 - 1, 0), (1, 0, 0, FULL, 0, 0)], ErrorCode.INVALID_ARGUMENT, "the same"),
    (ALL, ErrorCode.DATA_LOSS, "could not be verified"),
    ([(c, b, 63 - b, n, g, s) for c, b, _, n, g, s in ALL], ErrorCode.GONE, ""),
])
async def test_pieces_that_are_not_those_of_the_handoff(
    records: list[tuple[int, int, int, int, int, int]], code: ErrorCode, says: str
) -> None:
    """Out of range, overlapping, contradicting; wrong checksums; blocks that the handoff's token does not open."""
    async with started() as lab:
        error = await lab.pull(lambda opened: [opened, pieces(*records), closing_for(NUM_TOKENS)])
        assert error.code is code
        assert says in error.message


@pytest.mark.parametrize("end", [
    Closing(first_token_id=None, num_prompt_tokens=NUM_TOKENS), closing_for(NUM_TOKENS + 1), closing_for(NUM_TOKENS),
    Closing(first_token_id=None, num_prompt_tokens=1, finish_reason=FinishReason.STOP),
])
async def test_an_end_that_is_none(end: Closing) -> None:
    """Of a prefix, of more tokens, before everything was announced, or of a prefix that ends a request."""
    async with started() as lab:
        assert (await lab.pull(lambda opened: [opened, end])).code is ErrorCode.INVALID_ARGUMENT


async def test_room_in_flight_that_an_ended_pull_gives_back_is_used_at_once() -> None:
    """The lease of a fetch ends before the fetch has begun: who waits for its bytes is not left to the next tick."""
    piece_bytes = LAYOUT.piece_bytes(0)
    settings = TransferSettings(lease_ms=3_600_000, max_bytes_in_flight=piece_bytes)
    async with started(settings) as lab:
        source, side = lab.source, lab.destination
        keys = [new_key(), new_key()]
        book = side.destination._book
        right = book.next_fetch

        begun = asyncio.Event()

        def is_all_said() -> bool:
            leases = [book.get(key) for key in keys]
            is_read = not side.destination._desk._manifests
            return is_read and all(lease is not None and lease.closing is not None for lease in leases)

        def next_fetch() -> Any:
            fetch = right() if begun.is_set() else None
            if fetch is not None and fetch.lease.key == keys[0]:
                asyncio.get_running_loop().call_soon(side.destination.release, keys[0].journey_id, 1)
            return fetch

        book.next_fetch = next_fetch  # type: ignore[method-assign]
        for key in keys:
            info = source.begin(key, NUM_TOKENS)
            source.publish_all(key, NUM_TOKENS)
            side.reserve_and_pull(key, NUM_TOKENS, info)
        async with asyncio.timeout(30):
            await until(is_all_said)
            begun.set()
            side.destination.tick(0.0)
            result = await side.result_of(keys[1])
        assert side.contents(result, NUM_TOKENS) == source.contents(keys[1], NUM_TOKENS)
        side.free(keys[1])
        source.source.release(keys[0].journey_id, 1)
        await until(lambda: source.source.num_pins == 0)
        assert_pool_is_free(side.pool)


async def test_leases_expire_while_a_connection_is_slow_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    closes, closed = asyncio.Event(), asyncio.Event()

    async def sweep() -> None:
        closes.set()
        await closed.wait()

    async with started(TransferSettings(lease_ms=500)) as lab:
        monkeypatch.setattr(Peers, "is_empty", False)
        monkeypatch.setattr(lab.destination.destination._peers, "sweep", sweep)
        await closes.wait()
        key = new_key()
        lab.destination.destination.reserve(key, num_tokens=NUM_TOKENS, num_blocks=3)
        await until(lambda: lab.destination.expired == [key])
        closed.set()
