"""A gRPC server in memory: handlers as the generated code adds them, behind the system's own boundary interceptor."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from pd_engine.service.server import BoundaryInterceptor
from pd_ops.simulation.network import Call, Metadata, Network
from pd_ops.simulation.process import PROCESS, Process


class Witness(Protocol):
    """Sees every call at the server."""

    def called(self, server: Process, call: Call, request: Any) -> None: ...

    def answered(self, server: Process, call: Call, request: Any, reply: Any) -> None: ...

    def refused(self, server: Process, call: Call, request: Any, why: str) -> None: ...


class CallDetails:
    """What an interceptor is told of a call."""

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class CallContext:
    """What a handler is given: it can read what came with the call, answer a stream of replies, and abort it."""

    def __init__(self, invocation_metadata: Metadata) -> None:
        self._invocation_metadata = invocation_metadata
        self.on_reply: Callable[[Any], None] | None = None
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.metadata: Metadata = ()

    def invocation_metadata(self) -> Metadata:
        return self._invocation_metadata

    async def write(self, reply: Any) -> None:
        assert self.on_reply is not None, "replies are of a stream"
        self.on_reply(reply)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self.code, self.details, self.metadata = code, details, trailing_metadata
        raise grpc.aio.AbortError


class MemoryServer(grpc.aio.Server):
    """Of the process that makes it. Listens at "name:port" of the process."""

    def __init__(self, network: Network, secret: str | None, witness: Witness) -> None:
        process = PROCESS.get()
        assert process is not None, "a server belongs to a process"
        self.process = process
        self._network = network
        self._boundary = BoundaryInterceptor(secret)
        self._witness = witness
        self._handlers: dict[str, Any] = {}
        self._address = ""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Those of generated code are registered as well."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        for method, handler in method_handlers.items():
            self._handlers[f"/{service_name}/{method}"] = handler

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        self._address = f"{host}:{port}"
        return int(port)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("simulated servers have no TLS")

    async def start(self) -> None:
        self._network.servers[self._address] = self

    async def stop(self, grace: float | None) -> None:
        if self._network.servers.get(self._address) is self:
            self._network.died(self.process)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        await asyncio.Event().wait()
        return True

    def serve(self, call: Call) -> None:
        call.task = asyncio.get_running_loop().create_task(self._run(call), name=f"{call.method} {call.number}")

    def serve_again(self, call: Call) -> None:
        asyncio.get_running_loop().create_task(self._run_again(call), name=f"{call.method} {call.number} again")

    async def _run(self, call: Call) -> None:
        context = CallContext(call.metadata)
        try:
            await self._handle(call, context, call.send)
        except asyncio.CancelledError:
            call.end(grpc.StatusCode.CANCELLED, "cancelled", ())
            raise
        call.end(context.code, context.details, context.metadata)

    async def _run_again(self, call: Call) -> None:
        await self._handle(call, CallContext(call.metadata), lambda data: None)

    async def _handle(self, call: Call, context: CallContext, send: Callable[[bytes], None]) -> None:
        async def find(details: Any) -> Any:
            return self._handlers.get(call.path)

        handler = await self._boundary.intercept_service(find, CallDetails(call.path, call.metadata))  # type: ignore[arg-type]
        assert handler is not None, f"nobody answers {call.path}"
        request = handler.request_deserializer(call.data)
        self._witness.called(self.process, call, request)

        def answer(reply: Any) -> None:
            self._witness.answered(self.process, call, request, reply)
            send(handler.response_serializer(reply))

        try:
            if handler.response_streaming and inspect.isasyncgenfunction(handler.unary_stream):
                async with contextlib.aclosing(handler.unary_stream(request, context)) as replies:
                    async for reply in replies:
                        answer(reply)
            elif handler.response_streaming:
                context.on_reply = answer
                await handler.unary_stream(request, context)
            else:
                reply = await handler.unary_unary(request, context)
                self._witness.answered(self.process, call, request, reply)
                if self._network.weather.loses_reply(call):
                    context.code, context.details = grpc.StatusCode.UNAVAILABLE, "the connection was lost"
                else:
                    send(handler.response_serializer(reply))
        except grpc.aio.AbortError:
            self._witness.refused(self.process, call, request, f"{context.code.name}: {context.details}")
