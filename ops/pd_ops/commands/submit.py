"""`pd-relay submit`: one completion from a running cluster, through its gRPC door."""

from __future__ import annotations

import asyncio

import typer

from pd_engine.contracts import api_pb2
from pd_ops.client import find_router, router_client
from pd_ops.commands import options
from pd_ops.output import Output
from pd_ops.request_options import read_prompt, read_sampling, to_request
from pd_ops.results import chunk_document, complete_document, summary_line


def command(
    context: typer.Context,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.TokenIds = None,
    chat: options.Chat = False,
    add_bos: options.AddBos = None,
    parse_special: options.ParseSpecial = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = None,
    speculate: options.Speculate = None,
    stream: options.Stream = None,
    cluster: options.ClusterName = "default",
    address: options.Address = None,
    grpc_port: options.GrpcPort = None,
    as_json: options.Json = False,
) -> None:
    """Send a prompt to a running cluster and print what comes back, as it comes. Ctrl-C aborts the request."""
    output = options.start(context, as_json)
    question = read_prompt(
        prompt=prompt, prompt_file=prompt_file, token_ids=token_ids, chat=chat, add_bos=add_bos,
        parse_special=parse_special,
    )
    sampling = read_sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or [],
        ignore_eos=ignore_eos, logprobs=logprobs, speculate=speculate,
    )
    router = find_router(address=address, grpc_port=grpc_port, cluster=cluster)
    streams = not as_json if stream is None else stream
    asyncio.run(_submit(router, to_request(question, sampling, stream=streams), output))


async def _submit(router: str, request: api_pb2.GenerateRequest, output: Output) -> None:
    def show(chunk: api_pb2.GenerateStreamChunk) -> None:
        output.document(chunk_document(chunk))
        output.text(chunk.text, end="")

    async with router_client(router) as client:
        completion = await client.complete(request, show)
    for warning in completion.complete.warnings:
        output.note(f"warning: {warning}")
    document = complete_document(completion.complete)
    output.document({"event": "complete", **document} if request.stream else document)
    output.text("" if request.stream else completion.complete.text)
    output.note(summary_line(document))

