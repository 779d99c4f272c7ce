"""`pd-relay explain`: where a running cluster would place a prompt now, and what every worker would cost."""

from __future__ import annotations

import asyncio
import math

import typer

from pd_engine.contracts import api_pb2
from pd_engine.text.defaults import SamplingFields
from pd_ops.client import find_router, router_client
from pd_ops.commands import options
from pd_ops.output import Document
from pd_ops.request_options import read_prompt, to_request
from pd_ops.tables import table

COLUMNS = ("", "part", "worker", "cached blocks", "cost", "of which")


def command(
    context: typer.Context,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.TokenIds = None,
    chat: options.Chat = False,
    add_bos: options.AddBos = None,
    parse_special: options.ParseSpecial = False,
    max_tokens: options.MaxTokens = None,
    cluster: options.ClusterName = "default",
    address: options.Address = None,
    grpc_port: options.GrpcPort = None,
    as_json: options.Json = False,
) -> None:
    """Show where a prompt would run, and why: candidates and their costs. Nothing is run."""
    output = options.start(context, as_json)
    question = read_prompt(
        prompt=prompt, prompt_file=prompt_file, token_ids=token_ids, chat=chat, add_bos=add_bos,
        parse_special=parse_special,
    )
    request = to_request(question, SamplingFields(max_tokens=max_tokens))
    report = asyncio.run(_explain(find_router(address=address, grpc_port=grpc_port, cluster=cluster), request))
    document = report_document(report)
    output.document(document)
    output.text(report_text(document))


async def _explain(router: str, request: api_pb2.GenerateRequest) -> api_pb2.PlacementReport:
    async with router_client(router) as client:
        return await client.explain(request)


def report_document(report: api_pb2.PlacementReport) -> Document:
    """The documented keys."""
    even = report.break_even_tokens if report.HasField("break_even_tokens") else None
    return {
        "kind": report.kind, "prefill_worker": report.prefill_worker or None,
        "decode_worker": report.decode_worker or None, "ttft_ms": None if report.refusal else report.ttft_ms,
        "refusal": report.refusal or None, "num_prompt_tokens": report.num_prompt_tokens,
        "prefix_worker": report.prefix_worker or None, "num_prefix_blocks": report.num_prefix_blocks,
        "num_hashed_blocks": report.num_hashed_blocks, "local_prefill_offered": even is not None,
        "break_even_tokens": None if even is None or math.isinf(even) else even,
        "candidates": [
            {
                "part": candidate.part, "worker_id": candidate.worker_id, "chosen": candidate.chosen,
                "num_held_blocks": candidate.num_held_blocks,
                "terms_ms": {term.name: term.ms for term in candidate.terms},
                "exclusion": candidate.exclusion or None,
            }
            for candidate in report.candidates
        ],
    }


def report_text(document: Document) -> str:
    """For people: the decision, all candidates, and the rule for local prefill."""
    size = f"{document['num_prompt_tokens']} tokens to prefill, {document['num_hashed_blocks']} full blocks"
    if document["refusal"] is not None:
        lines = [f"refused: {document['refusal']} ({size})"]
    else:
        decode = document["decode_worker"] or "nobody: prefill samples the only token"
        lines = [
            f"{document['kind']} prefill at {document['prefill_worker']}, decode at {decode}; first token in about "
            f"{document['ttft_ms']:.1f} ms ({size})"
        ]
    if document["prefix_worker"] is not None:
        lines.append(f"of these, {document['num_prefix_blocks']} blocks fetched from {document['prefix_worker']}")
    lines.append(table(COLUMNS, [_row(candidate) for candidate in document["candidates"]]))
    if not document["local_prefill_offered"]:
        lines.append("local prefill: not offered by the decode worker")
    elif document["break_even_tokens"] is None:
        lines.append("local prefill: costs no more a token than a handoff")
    else:
        lines.append(f"local prefill: pays up to {document['break_even_tokens']:.0f} uncached tokens")
    return "\n".join(lines)


def _row(candidate: Document) -> tuple[str, ...]:
    terms = candidate["terms_ms"]
    cost = candidate["exclusion"] or f"{sum(terms.values()):.1f} ms"
    parts = " + ".join(f"{name} {ms:.1f}" for name, ms in terms.items())
    return (
        "*" if candidate["chosen"] else "", candidate["part"], candidate["worker_id"],
        str(candidate["num_held_blocks"]), cost, parts,
    )
