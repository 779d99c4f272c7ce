"""One run against one endpoint: finds out what it serves, sends the load, and makes the result's document."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from pd_engine.errors import InvalidArgument, Unavailable
from pd_engine.model.checkpoint import resolve_model
from pd_engine.model.config import ModelConfig
from pd_ops.bench.serve.about import Served, served_by_router, serving_identity
from pd_ops.bench.serve.grpc_sender import GrpcSender
from pd_ops.bench.serve.http_sender import Endpoint, HttpSender, get_json, room_for_connections
from pd_ops.bench.serve.load import LoadPlan, build_load
from pd_ops.bench.serve.plot import plot
from pd_ops.bench.serve.prompts import PromptMaker
from pd_ops.bench.serve.run import Measured, Measurement
from pd_ops.bench.serve.sender import Sampling, Sender
from pd_ops.bench.serve.summary import Targets, series, summarize
from pd_ops.bench.serve.watch import PoolWatch
from pd_ops.client import find_router, router_client
from pd_ops.cluster.interrupts import Interrupts
from pd_ops.output import Document


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """Where to send to: an HTTP address, or a pd-relay's gRPC door."""

    url: str | None = None
    api_key: str | None = None
    served_model: str | None = None
    cluster: str = "default"
    address: str | None = None
    grpc_port: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """What the user says of an endpoint; stands over what it says itself."""

    checkpoint: str | None = None
    engine: str | None = None
    precision: str | None = None
    max_context: int | None = None
    topology: Document | None = None
    settings: Document | None = None

    def over(self, served: Served) -> Served:
        return replace(served, **{name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An endpoint, ready. `watch`: of a pd-relay's pools."""

    sender: Sender
    served: Served
    watch: PoolWatch | None


async def measure(
    plan: LoadPlan, endpoints: Endpoints, described: Described, sampling: Sampling, targets: Targets, *,
    prompt_salt: str, max_in_flight: int, note: Callable[[str], None],
) -> tuple[Document, Measured, str]:
    """(the result's document, what was measured, the plot).

    Raises:
        InvalidArgument, NotFound: the load, or something of the identity that is not known.
        Unavailable: nobody answers.
    """
    async with _target(endpoints, described, sampling) as target:
        served = target.served
        if served.max_context is None:
            raise InvalidArgument("the endpoint does not tell its longest context: give --max-context")
        load = build_load(plan, served.max_context)
        most = max(request.output_tokens for request in load.requests)
        identity = serving_identity(served, max_new_tokens=most, sampling={**asdict(sampling), "ignore_eos": True})
        assert served.vocab_size is not None
        run = Measurement(
            load.requests, target.sender, PromptMaker(vocab_size=served.vocab_size, salt=prompt_salt),
            concurrency=plan.concurrency, note=note,
            max_in_flight=max_in_flight if endpoints.url is None else _room(plan.concurrency, max_in_flight),
        )
        measured = await _watched(run, target.watch)
    rows = series(measured.records, measured.span_s)
    summary = summarize(measured.records, targets, span_s=measured.span_s)
    document = {
        "identity": identity, "load": {**load.description, "prompt_salt": prompt_salt},
        "targets": targets.to_json(), "summary": summary,
        "series": rows, "pools": target.watch.samples if target.watch else [], "interrupted": measured.interrupted,
    }
    title = f"{identity['engine']}, {load.description['requests']} requests, {summary['good_share']:.0%} good"
    return document, measured, plot(measured.records, rows, targets, title)


def _room(concurrency: int | None, max_in_flight: int) -> int:
    """Raises:
    InvalidArgument: a closed loop of so many cannot be.
    """
    room = room_for_connections(concurrency or max_in_flight)
    if concurrency is not None and room < concurrency:
        raise InvalidArgument(f"--concurrency {concurrency}: this process may have {room} connections (ulimit -n)")
    return room


async def _watched(run: Measurement, watch: PoolWatch | None) -> Measured:
    watching = asyncio.create_task(watch.run(run.now)) if watch else None
    try:
        return await run.run(Interrupts().first)
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@asynccontextmanager
async def _target(endpoints: Endpoints, described: Described, sampling: Sampling) -> AsyncIterator[Target]:
    if endpoints.url is not None:
        if endpoints.address is not None or endpoints.grpc_port is not None:
            raise InvalidArgument("give --url, or --address or --grpc-port, not both")
        endpoint = Endpoint.parse(endpoints.url, endpoints.api_key)
        model = endpoints.served_model or await _first_model(endpoint)
        served = described.over(_from_checkpoint(described))
        yield Target(sender=HttpSender(endpoint, model, sampling), served=served, watch=None)
        return
    router = find_router(address=endpoints.address, grpc_port=endpoints.grpc_port, cluster=endpoints.cluster)
    async with router_client(router) as client:
        served = described.over(served_by_router(await client.model_info(), await client.server_info()))
        yield Target(sender=GrpcSender(client, sampling), served=served, watch=PoolWatch(client))


async def _first_model(endpoint: Endpoint) -> str:
    found: Any = await get_json(endpoint, "/v1/models")
    try:
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise Unavailable(f"{endpoint.host}:{endpoint.port} lists no model: give --served-model") from None


def _from_checkpoint(described: Described) -> Served:
    if described.checkpoint is None:
        raise InvalidArgument("--url needs --checkpoint: the vocabulary and the result's identity are read there")
    config = ModelConfig.load(resolve_model(described.checkpoint))
    return Served(vocab_size=config.vocab_size)
