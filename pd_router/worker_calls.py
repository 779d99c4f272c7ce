"""The calls of a router to one worker: each bounded, with the errors typed and the worker's name in them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

import grpc

from pd_engine.contracts import worker_pb2 as pb
from pd_engine.errors import DeadlineExceeded, PdRelayError, Unavailable
from pd_engine.service.client import decode_stub, prefill_stub, typed_error, worker_stub
from pd_router.reply_bounds import check_info, check_loads

LOADS_INTERVAL_MS = 200


class LateAnswer(Unavailable):
    """A worker has not answered a call in time. That alone does not make it a lost one."""


class WorkerCalls:
    """Args:
    channel: to the worker; closed with these.
    silence_s: how long an answer may take.
    check_epoch: called with the epoch of every reply; raises Unavailable if it is of another life.
    on_heard: called whenever the worker has said something.
    """

    def __init__(
        self,
        worker_id: str,
        channel: grpc.aio.Channel,
        *,
        router_id: str,
        silence_s: float,
        check_epoch: Callable[[str], None],
        on_heard: Callable[[], None],
    ) -> None:
        self._worker_id = worker_id
        self._router_id = router_id
        self._silence_s = silence_s
        self._check_epoch = check_epoch
        self._on_heard = on_heard
        self._channel = channel
        self.worker = worker_stub(self._channel)
        self._prefill = prefill_stub(self._channel)
        self._decode = decode_stub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    # Of journeys

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        with self._typed("Reserve"):
            reply = await self._decode.Reserve(request, timeout=self._silence_s)
        self._heard(reply.epoch)
        return reply

    async def pull(self, request: pb.PullRequest) -> None:
        with self._typed("Pull"):
            reply = await self._decode.Pull(request, timeout=self._silence_s)
        self._heard(reply.epoch)

    async def compute_prompt(self, request: pb.ComputePromptRequest) -> None:
        with self._typed("ComputePrompt"):
            reply = await self._decode.ComputePrompt(request, timeout=self._silence_s)
        self._heard(reply.epoch)

    async def prefill(self, request: pb.PrefillRequest) -> AsyncIterator[pb.PrefillReply]:
        """The replies, until the first token; the request's own deadline bounds it."""
        call = self._prefill.Prefill(request)
        try:
            with self._typed("Prefill"):
                async for reply in call:
                    self._on_heard()
                    yield reply
        finally:
            call.cancel()

    # Of the link

    async def info(self) -> pb.WorkerInfo:
        with self._typed("Info"):
            info = await self.worker.Info(pb.InfoRequest(), timeout=self._silence_s)
        check_info(info)
        return info

    async def renew(self, refs: Sequence[pb.JourneyRef]) -> pb.RenewReply:
        """Raises:
        LateAnswer: it has not answered in time; it may have renewed all the same.
        """
        with self._typed("Renew"):
            request = pb.RenewRequest(router_id=self._router_id, journeys=refs)
            reply = await self.worker.Renew(request, timeout=self._silence_s)
        self._heard(reply.epoch)
        return reply

    async def loads(self) -> AsyncIterator[pb.LoadsReply]:
        with self._typed("Loads"):
            async for loads in self.worker.Loads(pb.LoadsRequest(interval_ms=LOADS_INTERVAL_MS)):
                self._heard(loads.epoch)
                check_loads(loads)
                yield loads

    async def tokens(self) -> AsyncIterator[pb.TokensBatch]:
        with self._typed("Tokens"):
            async for batch in self.worker.Tokens(pb.TokensRequest(router_id=self._router_id)):
                self._heard(batch.epoch)
                yield batch

    async def cache_events(self, from_sequence: int) -> AsyncGenerator[pb.CacheEventBatch, None]:
        """Those after that one; 0: a snapshot first."""
        request = pb.CacheEventsRequest(from_sequence=from_sequence)
        with self._typed("CacheEvents"):
            async for batch in self.worker.CacheEvents(request):
                self._heard(batch.epoch)
                yield batch

    def _heard(self, epoch: str) -> None:
        self._check_epoch(epoch)
        self._on_heard()

    @contextlib.contextmanager
    def _typed(self, call: str) -> Iterator[None]:
        """A failed call as a typed error that says which worker it was; one not answered in time is a LateAnswer."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            typed: PdRelayError = typed_error(error)
            if isinstance(typed, DeadlineExceeded):
                raise LateAnswer(f"worker {self._worker_id} did not answer {call} in time") from None
            if error.code() is grpc.StatusCode.CANCELLED:
                raise Unavailable(f"worker {self._worker_id} cancelled {call}") from None
            raise typed from None
