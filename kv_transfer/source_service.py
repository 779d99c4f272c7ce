"""The source's gRPC service: checks what arrives, asks the book, streams manifests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import grpc.aio
import numpy as np

from kv_transfer.compatibility import check_compatible
from kv_transfer.journey import Clock, JourneyKey, is_hex_id
from kv_transfer.manifest import Opening, Part, Pieces
from kv_transfer.manifest_wire import MAX_LEASE_MS, MAX_PIECES_IN_PART, pack_part, unpack_hello
from kv_transfer.source_book import SourceBook
from kv_transfer.source_state import SourceHandoff
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.contracts import worker_pb2_grpc
from pd_engine.errors import Gone, InvalidArgument

Context = grpc.aio.ServicerContext[Any, Any]


class PieceStreams:
    """Wakes the manifest streams of a handoff when there is something new."""

    def __init__(self) -> None:
        self._events: dict[SourceHandoff, tuple[asyncio.Event, int]] = {}  # (event, number of streams)

    def wake(self, handoff: SourceHandoff | None) -> None:
        if handoff in self._events:
            self._events[handoff][0].set()

    def enter(self, handoff: SourceHandoff) -> asyncio.Event:
        event, count = self._events.get(handoff, (asyncio.Event(), 0))
        self._events[handoff] = (event, count + 1)
        return event

    def leave(self, handoff: SourceHandoff) -> None:
        event, count = self._events.pop(handoff)
        if count > 1:
            self._events[handoff] = (event, count - 1)

    def __len__(self) -> int:
        return sum(count for _, count in self._events.values())


class Source(Protocol):
    """What the service needs of a `HandoffSource`."""

    def opening(self, handoff: SourceHandoff) -> Opening: ...

    def settle(self) -> None: ...


class Holder(Protocol):
    """What the service needs of a `holds.PrefixHolder`."""

    def answer(self, request: pb.HoldRequest, epoch: str) -> pb.HoldReply: ...


class KvSourceService(worker_pb2_grpc.KvSourceServicer):
    """Errors are raised typed; the server turns them into statuses.

    Args:
        max_lease_ms: that a puller may ask for: more is cut to it, so that no pin stays longer for want of a word.
    """

    def __init__(
        self, source: Source, book: SourceBook, streams: PieceStreams, clock: Clock, epoch: str,
        holder: Holder | None, *, max_lease_ms: int,
    ) -> None:
        self._source = source
        self._book = book
        self._streams = streams
        self._clock = clock
        self._epoch = epoch
        self._holder = holder
        self._max_lease_ms = max_lease_ms

    async def Manifest(self, request: pb.ManifestRequest, context: Context) -> AsyncIterator[pb.ManifestPart]:
        """The manifest from its opening on, until it closes or fails. Raises Gone once the pins have ended."""
        key = _key(request.journey)
        _check_ids(token=request.token, source_epoch=request.source_epoch, destination_epoch=request.destination_epoch)
        hello = unpack_hello(request.hello)
        handoff = self._book.present(key, request.token)
        opening = self._source.opening(handoff)
        check_compatible(
            source=opening.worker_id, source_fingerprint=opening.fingerprint, source_layout=opening.layout,
            source_checksums=opening.checksums, destination=hello.worker_id,
            destination_fingerprint=hello.fingerprint, destination_layout=hello.layout,
            destination_checksums=hello.checksums,
        )
        self._book.open(
            key, request.token, source_epoch=request.source_epoch, puller_epoch=request.destination_epoch,
            lease_ms=min(hello.lease_ms, self._max_lease_ms), now_s=self._clock(),
        )
        yield _message(opening)
        async with aclosing(self._parts(handoff)) as parts:
            async for part in parts:
                yield _message(part)

    async def SourceRenew(self, request: pb.SourceRenewRequest, context: Context) -> pb.SourceRenewReply:
        """queued: nothing is published yet; running: something is; gone: the pins have ended."""
        if not 0 <= request.lease_ms <= MAX_LEASE_MS:
            raise InvalidArgument(f"lease_ms must be in [0, {MAX_LEASE_MS}], got {request.lease_ms}")
        _check_ids(token=request.token)
        try:
            handoff = self._book.present(_key(request.journey), request.token)
        except Gone:
            return pb.SourceRenewReply(state="gone")
        self._book.renew(handoff, min(request.lease_ms, self._max_lease_ms), self._clock())
        return pb.SourceRenewReply(state="running" if handoff.records or handoff.closing else "queued")

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:
        _check_ids(token=request.token)
        self._book.commit(_key(request.journey), request.token, self._clock())
        self._source.settle()
        return pb.CommitReply()

    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldReply:
        """Pins what is cached here of a prefix, to be fetched like a prompt."""
        if self._holder is None:
            return pb.HoldReply(epoch=self._epoch)
        return self._holder.answer(request, self._epoch)

    async def _parts(self, handoff: SourceHandoff) -> AsyncGenerator[Part, None]:
        num_sent = 0  # entries of handoff.records
        news = self._streams.enter(handoff)
        try:
            while True:
                if not handoff.is_live and handoff.closing is None:
                    if handoff.failed is None:
                        raise Gone
                    yield handoff.failed
                    return
                if num_sent < len(handoff.records):
                    records = np.concatenate(handoff.records[num_sent:])
                    num_sent = len(handoff.records)
                    for start in range(0, len(records), MAX_PIECES_IN_PART):
                        yield Pieces(records[start : start + MAX_PIECES_IN_PART])
                elif handoff.closing is not None:
                    yield handoff.closing
                    return
                else:
                    news.clear()
                    await news.wait()
        finally:
            self._streams.leave(handoff)


def _message(part: Part) -> pb.ManifestPart:
    return pb.ManifestPart(part=pack_part(part))


def _key(ref: pb.JourneyRef) -> JourneyKey:
    return JourneyKey.parse(ref.journey_id, ref.attempt)


def _check_ids(**ids: str) -> None:
    for name, value in ids.items():
        if not is_hex_id(value):
            raise InvalidArgument(f"{name} must be 32 hexadecimal digits, got {value[:64]!r}")
