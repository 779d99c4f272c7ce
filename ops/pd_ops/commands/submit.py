"""`pd-relay submit`: one completion from a running cluster, through its gRPC door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import typer

from pd_engine.contracts import api_pb2
from pd_engine.priority import DEFAULT_PRIORITY
from pd_ops.answers import AnswerView
from pd_ops.client import Event, find_router, router_client
from pd_ops.cluster.interrupts import Interrupts, unless
from pd_ops.commands import options
from pd_ops.output import Interrupted, Output
from pd_ops.request_options import read_dtype, read_num_choices, read_prompt, read_sampling, to_request
from pd_ops.results import chunk_document, complete_document


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
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    min_tokens: options.MinTokens = None,
    seed: options.Seed = None,
    n: options.NumChoices = 1,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = None,
    speculate: options.Speculate = None,
    dtype: options.ServedDtype = None,
    priority: options.Priority = DEFAULT_PRIORITY,
    user: options.User = "",
    ttft_target_ms: options.TtftTargetMs = None,
    itl_target_ms: options.ItlTargetMs = None,
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
        ignore_eos=ignore_eos, logprobs=logprobs, speculate=speculate, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=logit_bias or [], min_tokens=min_tokens,
    )
    num_choices = read_num_choices(n)
    required_dtype = read_dtype(dtype)
    router = find_router(address=address, grpc_port=grpc_port, cluster=cluster)
    streams = not as_json if stream is None else stream
    # Streamed in any case: what had come is known when it is interrupted.
    request = to_request(question, sampling, priority=priority, num_choices=num_choices)
    request.user, request.ttft_target_ms, request.itl_target_ms = user, ttft_target_ms or 0, itl_target_ms or 0
    view = AnswerView(output, streams=streams, num_choices=num_choices)
    asyncio.run(_submit(router, request, required_dtype, output, view))


async def _ask(
    router: str, request: api_pb2.GenerateRequest, dtype: str | None, on_event: Callable[[Event], None]
) -> bool:
    """True, once all has come.

    Raises:
        PdRelayError: the router answered with it, or the cluster does not serve `dtype`.
    """
    async with router_client(router) as client:
        if dtype is not None:
            await client.require_dtype(dtype)
        await client.run(request, on_event)
    return True


async def _submit(
    router: str, request: api_pb2.GenerateRequest, dtype: str | None, output: Output, view: AnswerView
) -> None:
    """Raises:
    Interrupted: Ctrl-C or SIGTERM came first; the request is cancelled.
    """
    warned: set[str] = set()

    def show(event: Event) -> None:
        if isinstance(event, api_pb2.GenerateStreamChunk):
            view.step(event.choice, chunk_document(event))
            return
        for warning in [warning for warning in event.warnings if warning not in warned]:
            warned.add(warning)
            output.note(f"warning: {warning}")
        view.end(event.choice, complete_document(event))

    if not await unless(Interrupts().first, _ask(router, request, dtype, show)):
        view.interrupt()
        raise Interrupted
    view.close()
