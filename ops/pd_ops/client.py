"""A client of the public gRPC door: one stream a request, errors typed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc

from pd_engine.contracts import api_pb2, api_pb2_grpc
from pd_engine.errors import FailedPrecondition, InvalidArgument, PdRelayError, Unavailable
from pd_engine.service.client import typed_error
from pd_ops.client_access import ClientAccess
from pd_ops.cluster.ray_runtime import LOOPBACK
from pd_ops.cluster.state_file import ClusterState, Phase, read_state
from pd_ops.latency import StreamTiming

if TYPE_CHECKING:
    from pd_engine.contracts.api_pb2_grpc import PdRelayAsyncStub

CALL_TIMEOUT_S = 10.0
NO_CONNECTION = "failed to connect to all addresses"  # as gRPC puts it
LOST_CONNECTION = ("Stream removed", "Socket closed", "recvmsg:", "Connection reset")
T = TypeVar("T")
Event = api_pb2.GenerateStreamChunk | api_pb2.GenerateComplete


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished request, and when its tokens came."""

    complete: api_pb2.GenerateComplete
    timing: StreamTiming


class RouterClient:
    """Calls one router. Every call raises the typed error that the router answered with."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub: PdRelayAsyncStub = api_pb2_grpc.PdRelayStub(channel)
        self._address = address

    async def stream(self, request: api_pb2.GenerateRequest) -> AsyncIterator[api_pb2.GenerateResponse]:
        """The chunks of a request, and last `complete`. Leaving early cancels it."""
        call = self._stub.Generate(request)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise _told(error, self._address) from None
        finally:
            call.cancel()

    async def run(self, request: api_pb2.GenerateRequest, on_event: Callable[[Event], None]) -> None:
        """Runs a request to the end of all its choices.

        Raises:
            Unavailable: the stream ended without a result of each.
        """
        num_wanted = max(1, request.sampling_params.n)
        async for response in self.stream(request):
            if response.HasField("chunk"):
                on_event(response.chunk)
            elif response.HasField("complete"):
                on_event(response.complete)
                num_wanted -= 1
        if num_wanted:
            raise Unavailable(f"the router at {self._address} ended the stream without a result")

    async def complete(
        self, request: api_pb2.GenerateRequest,
        on_chunk: Callable[[api_pb2.GenerateStreamChunk], None] = lambda chunk: None,
    ) -> Completion:
        """Runs a request of one choice to its end.

        Raises:
            Unavailable: the stream ended without a result.
        """
        start, arrivals, completes = time.monotonic(), [], []

        def take(event: Event) -> None:
            if isinstance(event, api_pb2.GenerateComplete):
                completes.append(event)
            else:
                arrivals.append((time.monotonic(), len(event.token_ids)))
                on_chunk(event)

        await self.run(request, take)
        return Completion(complete=completes[0], timing=StreamTiming(start=start, arrivals=tuple(arrivals)))

    async def model_info(self) -> api_pb2.GetModelInfoResponse:
        call = self._stub.GetModelInfo(api_pb2.GetModelInfoRequest(), timeout=CALL_TIMEOUT_S)
        return await _typed(call, self._address)

    async def explain(self, request: api_pb2.GenerateRequest) -> api_pb2.PlacementReport:
        """Where it would be placed now."""
        return await _typed(self._stub.Explain(request, timeout=CALL_TIMEOUT_S), self._address)

    async def require_dtype(self, dtype: str) -> None:
        """Raises:
        FailedPrecondition: the cluster serves another one.
        Unavailable: it is not known yet, because no worker has joined.
        """
        served = (await self.model_info()).dtype
        if not served:
            raise Unavailable(f"no worker of the router at {self._address} has joined yet, so its dtype is not known")
        if served != dtype:
            raise FailedPrecondition(
                f"--dtype is {dtype}, but the cluster at {self._address} serves {served}; leave --dtype out, or start "
                f"a cluster with --dtype {dtype}"
            )

    async def loads(self) -> list[api_pb2.WorkerLoad]:
        """Of the workers that report at present."""
        return list((await self.all_loads()).loads)

    async def all_loads(self) -> api_pb2.GetLoadsResponse:
        """With the router's own."""
        return await _typed(self._stub.GetLoads(api_pb2.GetLoadsRequest(), timeout=CALL_TIMEOUT_S), self._address)

    async def traces(self, request: api_pb2.GetTracesRequest) -> list[api_pb2.Trace]:
        return list((await _typed(self._stub.GetTraces(request, timeout=CALL_TIMEOUT_S), self._address)).traces)

    async def server_info(self) -> api_pb2.GetServerInfoResponse:
        call = self._stub.GetServerInfo(api_pb2.GetServerInfoRequest(), timeout=CALL_TIMEOUT_S)
        return await _typed(call, self._address)


def _told(error: grpc.aio.AioRpcError, address: str) -> PdRelayError:
    """The typed error; where no router was reached, or the connection ended under a call, gRPC's details are no words
    for people."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and details.startswith(LOST_CONNECTION):
        return Unavailable(f"the connection to the router at {address} was lost ({details})")
    if error.code() is grpc.StatusCode.UNAVAILABLE and details.startswith(NO_CONNECTION):
        if "timed out" in details:
            return Unavailable(f"the router at {address} does not answer: it hangs, or its host is too busy or cut off")
        return Unavailable(f"no router is reached at {address}: {details.rpartition(': ')[2]}")
    return typed_error(error)


async def _typed(call: Awaitable[T], address: str) -> T:
    """Of a question that a router answers at once.

    Raises:
        Unavailable: it did not.
        PdRelayError: that it answered with.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Unavailable(
                f"the router at {address} did not answer in {CALL_TIMEOUT_S:g} s: it hangs, or its host is too busy"
            ) from None
        raise _told(error, address) from None


@asynccontextmanager
async def router_client(address: str) -> AsyncIterator[RouterClient]:
    """A client of the router at "host:port", with what the environment says of access (`client_access`).

    Raises:
        InvalidArgument: that is wrong.
    """
    async with ClientAccess.from_environment().connect(address) as channel:
        yield RouterClient(channel, address)


async def server_info(address: str) -> api_pb2.GetServerInfoResponse:
    """What the router at "host:port" says of itself and its workers."""
    async with router_client(address) as client:
        return await client.server_info()


def find_router(*, address: str | None, grpc_port: int | None, cluster: str) -> str:
    """The address that a command shall talk to: the one that was given, or that of a cluster on this host.

    Raises:
        InvalidArgument: both --address and --grpc-port were given, or no HOST:PORT.
        NotFound: no cluster of that name runs here.
        Unavailable: it is not ready.
    """
    if address is not None and grpc_port is not None:
        raise InvalidArgument("give --address or --grpc-port, not both")
    if grpc_port is not None:
        return checked_address(f"{LOOPBACK}:{grpc_port}")
    if address is not None:
        return checked_address(address)
    return ready_state(cluster).grpc_address


def ready_state(cluster: str) -> ClusterState:
    """The state of a cluster on this host that serves.

    Raises:
        NotFound: no cluster of that name runs here.
        Unavailable: it is not ready.
    """
    state = read_state(cluster)
    if state.phase is not Phase.READY:
        raise Unavailable(f"the cluster {cluster!r} is {state.phase.value}")
    return state


def checked_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5) or not 1 <= int(port) <= 65535:
        raise InvalidArgument(f"an address is HOST:PORT with a port from 1 to 65535, got {address[:80]!r}")
    return address
