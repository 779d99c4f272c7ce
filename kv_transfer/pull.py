"""What a pull does on the network: reads a manifest, fetches batches, renews, commits. It reports to the book, which
decides; nothing here outlives the call that it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from kv_transfer.compatibility import check_compatible
from kv_transfer.destination_book import DestinationBook
from kv_transfer.destination_state import Fetch, LeaseRecord, LeaseState
from kv_transfer.journey import Clock, JourneyKey, SourceInfo
from kv_transfer.manifest import Closing, Failed, Hello, Opening, Pieces
from kv_transfer.manifest_wire import pack_hello, unpack_part
from kv_transfer.peers import Link, Peers
from kv_transfer.threads import run_in_thread
from kv_transfer.transfer_totals import TransferTotals
from kv_transfer.transport import Checksums, Fetched
from kv_transfer.verification import must_read, spans_of, take_in, verify
from pd_engine.cache.arena import Arena
from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import (
    DeadlineExceeded,
    Gone,
    Internal,
    InvalidArgument,
    PdRelayError,
    Unavailable,
    from_code,
)
from pd_engine.service.client import typed_error
from pd_engine.service.rates import Rate
from pd_engine.settings import TransferSettings

log = logging.getLogger(__name__)

MAX_RECONNECTS = 3  # a call after a break may meet the same connection, not yet known to be broken
COMMIT_TRIES = 3


class PullDesk:
    """Args:
    epoch: of the destination.
    settle: acts on the book's news; called after every report to the book.

    Attributes:
    bytes_per_s: of single fetches, others beside them.
    totals: of this life.
    """

    def __init__(
        self, book: DestinationBook, peers: Peers, *, arena: Arena, hello: Hello, epoch: str,
        settings: TransferSettings, checksums: Checksums, clock: Clock, settle: Callable[[], None],
    ) -> None:
        self._book = book
        self._peers = peers
        self._arena = arena
        self._hello = hello
        self._epoch = epoch
        self._settings = settings
        self._checksums = checksums if settings.checksums else None
        self._clock = clock
        self._settle = settle
        self.bytes_per_s = Rate()
        self.totals = TransferTotals()
        self._manifests: dict[LeaseRecord, asyncio.Task[None]] = {}
        self._links: dict[LeaseRecord, Link] = {}
        self._transfers: dict[int, asyncio.Task[Fetched]] = {}  # by number of the fetch

    @property
    def _timeout_s(self) -> float:
        return self._settings.fetch_timeout_ms / 1000

    async def run(self, lease: LeaseRecord, source: SourceInfo) -> None:
        """Reads the manifest to its end, or until `stop_manifest`."""
        if lease.state is not LeaseState.PULLING:  # it ended before this began
            return
        reader = self._manifests[lease] = asyncio.create_task(self._read(lease, source))
        try:
            await asyncio.wait([reader])
            # A call that its channel or its server has cancelled ends like one that we have cancelled: then the lease
            # still pulls.
            error = Unavailable("the manifest was cut off") if reader.cancelled() else reader.exception()
            if error is not None:
                self._book.break_pull(lease, _typed(error, f"pull of {lease.key}"))
            self._settle()
        finally:
            del self._manifests[lease]

    def stop_manifest(self, lease: LeaseRecord) -> None:
        """Nothing more is read or newly fetched for it; what is in flight goes on."""
        reader = self._manifests.get(lease)
        if reader is not None:
            reader.cancel()
        self._unlink(lease)

    def stop_fetches(self, lease: LeaseRecord) -> None:
        for number in lease.fetches:
            if number in self._transfers:
                self._transfers[number].cancel()

    async def fetch(self, fetch: Fetch) -> None:
        """Fetches and verifies one batch; if that fails, the pull breaks, and the fetch counts as in flight until the
        transport says that it cannot write any more."""
        if fetch.lease not in self._links:  # it ended before this began
            self._book.quiesced(fetch)
            self._settle()  # others may have its place
            return
        link = self._links[fetch.lease]
        link.num_pulls += 1
        transfer = self._transfers[fetch.number] = asyncio.create_task(self._transfer(fetch, link))
        try:
            error = await _end_of(transfer)
            if error is None:
                check = asyncio.create_task(self._verify(fetch, transfer.result()))
                error = await _end_of(check)
                if error is None:
                    self._book.fetched(fetch, check.result(), self._clock())
            if error is not None:
                self._book.break_pull(fetch.lease, _typed(error, f"fetch for {fetch.lease.key}"))
                self._settle()
                await self._quiesce(link)
                self._book.quiesced(fetch)
        finally:
            del self._transfers[fetch.number]
            self._peers.release(link)
        self._settle()

    async def renew(self, lease: LeaseRecord, now_s: float) -> None:
        """Tells the source that the lease goes on; its answer renews the lease, as of the time of asking."""
        source = lease.source
        assert source is not None
        request = pb.SourceRenewRequest(journey=_ref(lease.key), token=source.token, lease_ms=lease.lease_ms)
        try:
            reply = await self._peers.stub(source.address, source.epoch).SourceRenew(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:  # the peer's deadline decides when it counts as stalled
            log.warning("renewal of %s: %s", lease.key, typed_error(error).message)
            return
        if reply.state == "gone":
            self._book.break_pull(lease, Gone())
        else:
            self._book.heard(lease, now_s)
        self._settle()

    async def commit(self, key: JourneyKey, source: SourceInfo) -> None:
        """Ends the source's pins. If it cannot be told, they expire."""
        request = pb.CommitRequest(journey=_ref(key), token=source.token)
        for _ in range(COMMIT_TRIES):
            try:
                await self._peers.stub(source.address, source.epoch).Commit(request, timeout=self._timeout_s)
                return
            except grpc.aio.AioRpcError as error:
                typed = typed_error(error)
                log.warning("commit of %s: %s", key, typed.message)
                if not isinstance(typed, (Unavailable, DeadlineExceeded)):
                    return

    async def _read(self, lease: LeaseRecord, source: SourceInfo) -> None:
        for remaining in reversed(range(MAX_RECONNECTS + 1)):
            try:
                await self._read_once(lease, source)
                return
            except grpc.aio.AioRpcError as error:
                typed = typed_error(error)
                if not isinstance(typed, Unavailable) or not remaining:
                    raise typed from None
                log.warning("manifest of %s broke off, asking again: %s", lease.key, typed.message)

    async def _read_once(self, lease: LeaseRecord, source: SourceInfo) -> None:
        request = pb.ManifestRequest(
            journey=_ref(lease.key), token=source.token, source_epoch=source.epoch, destination_epoch=self._epoch,
            hello=pack_hello(replace(self._hello, lease_ms=lease.lease_ms)),
        )
        call = self._peers.stub(source.address, source.epoch).Manifest(request)
        try:
            await self._read_parts(lease, source, call)
        finally:
            call.cancel()

    async def _read_parts(self, lease: LeaseRecord, source: SourceInfo, call: AsyncIterable[pb.ManifestPart]) -> None:
        is_open = False
        async for message in call:
            part = unpack_part(message.part)
            if isinstance(part, Opening) is is_open:
                raise InvalidArgument(f"manifest: {type(part).__name__.lower()} is out of place")
            match part:
                case Opening():
                    await self._open(lease, source, part)
                    is_open = True
                case Pieces(records):
                    self._book.announced(lease, records)
                    self._settle()
                case Closing():
                    self._book.closed(lease, part, self._clock())
                    self._settle()
                    return
                case Failed(code=code, message=text):
                    raise from_code(code.value, text)
        raise Unavailable("the manifest ended without closing")

    async def _open(self, lease: LeaseRecord, source: SourceInfo, opening: Opening) -> None:
        hello = self._hello
        check_compatible(
            source=opening.worker_id, source_fingerprint=opening.fingerprint, source_layout=opening.layout,
            source_checksums=opening.checksums, destination=hello.worker_id,
            destination_fingerprint=hello.fingerprint, destination_layout=hello.layout,
            destination_checksums=hello.checksums,
        )
        if opening.epoch != source.epoch:
            raise Gone
        link = await self._peers.acquire(source, opening, self._timeout_s)
        self._unlink(lease)
        self._links[lease] = link
        lease.transport = link.transport.name
        self._book.opened(lease, opening)

    async def _transfer(self, fetch: Fetch, link: Link) -> Fetched:
        source = fetch.lease.source
        assert source is not None
        spans, started_s = spans_of(fetch, self._arena, link.num_arena_blocks), self._clock()
        fetched = await link.connection.fetch(spans, token=source.token, timeout_s=self._timeout_s)
        num_bytes, seconds = spans.num_bytes, self._clock() - started_s
        self.bytes_per_s.add(num_bytes, seconds)
        self.totals.note_fetch(num_bytes, seconds)
        return fetched

    async def _verify(self, fetch: Fetch, fetched: Fetched) -> npt.NDArray[np.bool_]:
        """Outside the event loop's thread, if it takes long. What is right is in the arena's components afterwards."""
        if must_read(fetch, fetched, self._checksums):
            is_right_N = await run_in_thread(None, partial(verify, fetch, fetched, self._arena, self._checksums))
        else:
            is_right_N = verify(fetch, fetched, self._arena, self._checksums)
        if self._arena.is_staged:
            await run_in_thread(None, partial(take_in, fetch, is_right_N, self._arena))
        return is_right_N

    def _unlink(self, lease: LeaseRecord) -> None:
        if lease in self._links:
            self._peers.release(self._links.pop(lease))

    async def _quiesce(self, link: Link) -> None:
        started_s = self._clock()
        await link.connection.quiesce()
        took_ms = (self._clock() - started_s) * 1000
        if took_ms > link.transport.capabilities.ending_ms:
            log.error("%s took %.0f ms to end its fetches", link.transport.name, took_ms)


async def _end_of(task: asyncio.Task[Any]) -> BaseException | None:
    """What it ended with."""
    await asyncio.wait([task])
    return Gone() if task.cancelled() else task.exception()


def _ref(key: JourneyKey) -> pb.JourneyRef:
    return pb.JourneyRef(journey_id=key.journey_id, attempt=key.attempt)


def _typed(error: BaseException, what: str) -> PdRelayError:
    """Whatever ended a task, as a typed error; what nobody expected is logged."""
    if isinstance(error, PdRelayError):
        return error
    if isinstance(error, grpc.RpcError):
        return typed_error(error)
    log.error("%s failed", what, exc_info=error)
    return Internal(f"{what} failed: {type(error).__name__}")
