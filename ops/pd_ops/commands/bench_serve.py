"""`pd-relay bench serve`: requests of a trace against a running endpoint, and which of them were served in time."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Annotated

import typer

from pd_engine.errors import InvalidArgument
from pd_ops.bench.serve.kinds import KINDS
from pd_ops.bench.serve.load import LoadPlan
from pd_ops.bench.serve.measure import Described, Endpoints, measure
from pd_ops.bench.serve.result import new_folder, write_result
from pd_ops.bench.serve.sender import Sampling
from pd_ops.bench.serve.summary import ItlOf, Targets
from pd_ops.bench.serve.text import result_text
from pd_ops.bench.serve.traces import FORMATS
from pd_ops.commands import options
from pd_ops.output import Document, Interrupted

TTFT_MS, ITL_MS = 2000.0, 100.0


def command(
    context: typer.Context,
    trace: Annotated[Path | None, typer.Option(help="Requests from this file: Mooncake, Azure or ServeGen.")] = None,
    trace_format: Annotated[str | None, typer.Option(help=f"{', '.join(FORMATS)}; default: as it looks.")] = None,
    skip: Annotated[int, typer.Option(min=0, help="Requests of the trace to leave out at its beginning.")] = 0,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Without a trace: {', '.join(KINDS)}; repeatable, mixed evenly.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="To send at most.")] = 100,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Requests a second; default: the trace's, or 1.")
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(min=0, max=100, help="Variation of gaps: 0 a clock, 1 Poisson, more bursts.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="A closed loop of so many requests; hides waiting.")
    ] = None,
    length_scale: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Lengths times this; default: what fits the context.")
    ] = None,
    ttft_target_ms: Annotated[float, typer.Option(min=0, help="A good request has its first token by then.")] = TTFT_MS,
    itl_target_ms: Annotated[float, typer.Option(min=0, help="And no more than this between tokens.")] = ITL_MS,
    itl_of: Annotated[str, typer.Option(help="Which of its times between tokens: mean, p99 or max.")] = "mean",
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of arrivals, lengths, prompts and sampling.")] = 0,
    prompt_salt: Annotated[
        str | None, typer.Option(help="Same salt, same prompts, which a cache may still have; default: a new one.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: greedy.")] = 0.0,
    speculate: options.Speculate = None,
    max_in_flight: Annotated[int, typer.Option(min=1, max=100_000, help="Open requests at most.")] = 4096,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json, records.jsonl and plot.svg.")] = None,
    cluster: options.ClusterName = "default",
    address: options.Address = None,
    grpc_port: options.GrpcPort = None,
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible endpoint, http://HOST:PORT, in place of gRPC.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="PD_RELAY_BENCH_API_KEY", help="Its bearer token.")] = None,
    served_model: Annotated[str | None, typer.Option(help="Its model's name; default: the first it lists.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Path of what is served; needed with --url.")] = None,
    engine: Annotated[str | None, typer.Option(help="Identity of another endpoint: name and version.")] = None,
    precision: Annotated[str | None, typer.Option(help="Its dtype.")] = None,
    max_context: Annotated[int | None, typer.Option(min=2, help="Its longest context.")] = None,
    topology: Annotated[list[str] | None, typer.Option(help="Its NAME=VALUE, such as prefill=1; repeatable.")] = None,
    engine_setting: Annotated[list[str] | None, typer.Option(help="Its NAME=VALUE; repeatable.")] = None,
    as_json: options.Json = False,
) -> None:
    """Send requests when they are due to a running cluster, or to any OpenAI-compatible endpoint, and say how many were
    served within the targets. Latencies count from when a request was due. Ctrl-C keeps what was measured."""
    output = options.start(context, as_json)
    targets = Targets(ttft_ms=ttft_target_ms, itl_ms=itl_target_ms, itl_of=_itl_of(itl_of))
    plan = LoadPlan(
        trace=trace, trace_format=_format(trace_format), skip=skip, kinds=tuple(kind or ()), num_requests=requests,
        rate_per_s=rate, variation=burstiness, concurrency=concurrency, length_scale=length_scale, seed=seed,
    )
    described = Described(
        checkpoint=checkpoint, engine=engine, precision=precision, max_context=max_context,
        topology=_pairs(topology, "--topology"), settings=_pairs(engine_setting, "--engine-setting"),
    )
    endpoints = Endpoints(url=url, api_key=api_key, served_model=served_model, cluster=cluster, address=address,
                          grpc_port=grpc_port)
    folder = new_folder(out) if out is not None else None
    salt = secrets.token_hex(4) if prompt_salt is None else prompt_salt
    document, measured, plot = asyncio.run(measure(
        plan, endpoints, described, Sampling(temperature=temperature, seed=seed, speculate=speculate), targets,
        prompt_salt=salt, max_in_flight=max_in_flight, note=output.note,
    ))
    if folder is not None:
        write_result(folder, document, measured.records, plot)
    output.document(document)
    output.text(result_text(document))
    if folder is not None:
        output.note(f"written to {folder}")
    if measured.interrupted:
        raise Interrupted


def _itl_of(text: str) -> ItlOf:
    try:
        return ItlOf(text)
    except ValueError:
        raise InvalidArgument(f"--itl-of must be mean, p99 or max, got {text[:40]!r}") from None


def _format(text: str | None) -> str | None:
    if text is not None and text not in FORMATS:
        raise InvalidArgument(f"--trace-format must be {', '.join(FORMATS)}, got {text[:40]!r}")
    return text


def _pairs(texts: list[str] | None, flag: str) -> Document | None:
    if texts is None:
        return None
    pairs = [text.partition("=") for text in texts]
    if broken := [name for name, equals, _ in pairs if not equals or not name]:
        raise InvalidArgument(f"{flag} must be NAME=VALUE, got {broken[0][:80]!r}")
    return {name: int(value) if value.isascii() and value.isdigit() else value for name, _, value in pairs}
