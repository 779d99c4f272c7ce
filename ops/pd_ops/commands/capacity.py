"""`pd-relay capacity`: what a model takes, before anybody rents a card for it."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_engine.errors import EXIT_CHECK_FAILED, EXIT_OK, InvalidArgument
from pd_ops.capacity.architecture import Architecture
from pd_ops.capacity.audit import Demand, audit, smallest_tp
from pd_ops.capacity.checks import checks
from pd_ops.capacity.named import NAMES, architecture
from pd_ops.capacity.report import sections
from pd_ops.capacity.traffic import Link
from pd_ops.commands import options

GIB = 2**30
MAX_BATCH = 1 << 20


def command(
    context_: typer.Context,
    model: Annotated[str, typer.Option(help=f"{', '.join(NAMES)}, demo, or a folder.")] = NAMES[0],
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a request; default: 32768 at most.")] = None,
    batch: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Requests at once.")] = 8,
    gpu_gib: Annotated[float, typer.Option(min=0.001, max=1e6, help="Memory of a card.")] = 80.0,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size; default: smallest that fits.")] = None,
    mean_context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request on average, for paged caches; default: half.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of a block, for paged caches.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Prompt tokens of a step.")] = 4096,
    index_tile: Annotated[int, typer.Option(min=1, max=1 << 24, help="Queries that an indexer scores at once.")] = 1024,
    collectives_gib: Annotated[float, typer.Option(min=0, help="Buffers of the communication library.")] = 1.0,
    graphs_gib: Annotated[float, typer.Option(min=0, help="Captured graphs.")] = 1.0,
    margin: Annotated[float, typer.Option(min=0, max=1, help="Share of a card that stays free.")] = 0.05,
    link_gb_per_s: Annotated[float, typer.Option(min=0.001, help="Of all-reduces and handoffs, 10^9 bytes/s.")] = 50.0,
    link_latency_us: Annotated[float, typer.Option(min=0, help="Of one message over it.")] = 5.0,
    as_json: options.Json = False,
) -> int:
    """Print bytes and legal layouts of a model: weights, cache, tensor parallelism, links, one card's memory. Nothing
    is loaded or run. Exit code 1 if its figures do not agree with each other."""
    output = options.start(context_, as_json)
    found = architecture(model)
    tokens = _context(found, context)
    demand = Demand(
        context=tokens, batch=batch, gpu_bytes=round(gpu_gib * GIB),
        mean_context=min(tokens, mean_context or -(-tokens // 2)), block_size=block_size, chunk_tokens=chunk_tokens,
        index_tile=index_tile, collectives_bytes=round(collectives_gib * GIB), graphs_bytes=round(graphs_gib * GIB),
        margin=margin,
    )
    smallest = smallest_tp(found, demand)
    size = _checked_tp(found, tp) if tp is not None else smallest or found.legal_tps()[-1]
    link = Link(name=f"a link of {link_gb_per_s:g} GB/s", gb_per_s=link_gb_per_s, latency_us=link_latency_us)
    parts = sections(found, demand, size, link)
    made = checks(found, demand, size)
    failed = [check for check in made if not check.passed]
    output.document({
        "model": found.name, "context": tokens, "batch": batch, "gpu_gib": gpu_gib, "tp": size,
        "legal_tps": list(found.legal_tps()), "smallest_tp": smallest, "fits": audit(found, demand, size).fits,
        **{part.key: [figure.to_json() for figure in part.figures] for part in parts},
        "checks": [check.to_json() for check in made],
    })
    output.text(f"{found.name}: context {tokens:,}, batch {batch}, {gpu_gib:g} GiB cards, TP {size}\n")
    output.text("\n\n".join(part.text() for part in parts))
    output.text(f"\nself-check: {len(made) - len(failed)} of {len(made)} agree")
    for check in failed:
        output.text(f"  {check.name}: expected {check.expected:,}, found {check.found:,}")
    return EXIT_CHECK_FAILED if failed else EXIT_OK


def _context(model: Architecture, context: int | None) -> int:
    if context is None:
        return min(32_768, model.max_context)
    if context > model.max_context:
        raise InvalidArgument(f"--context must be at most the model's {model.max_context}, got {context}")
    return context


def _checked_tp(model: Architecture, tp: int) -> int:
    if (reason := model.illegal_because(tp)) is not None:
        allowed = ", ".join(map(str, model.legal_tps()))
        raise InvalidArgument(f"--tp {tp} is not legal: {reason}; legal are {allowed}")
    return tp
