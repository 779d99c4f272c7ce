"""`pd-relay bench router`: what the router costs, in front of workers that compute nothing."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.router_load import Effort, RouterRow, measure_router
from pd_ops.commands import options
from pd_ops.tables import table

COLUMNS = (
    "door", "requests/s", "a core", "TTFT p50", "added", "p99", "added", "tokens/s", "a core", "messages a token"
)


def command(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(min=0.5, help="That each rate is measured, about.")] = 10.0,
    requests: Annotated[int, typer.Option(min=32, help="For the highest rate.")] = 2_000,
    step_us: Annotated[int, typer.Option(min=100, help="Pace of the 64 streams: microseconds a token.")] = 8_000,
    as_json: options.Json = False,
) -> None:
    """Measure the router's own cost through both of its doors: requests a second, what it adds to the time to the first
    token at half that rate, and streamed tokens a second. "A core": by CPU time of the router's process."""
    output = options.start(context, as_json)
    about = identity()
    rows = asyncio.run(measure_router(Effort(seconds=seconds, step_us=step_us, num_requests=requests)))
    output.document({**about, "seconds": seconds, "step_us": step_us, "rows": [row.to_json() for row in rows]})
    output.text("\n".join([identity_text(about), _table(rows)]))


def _table(rows: list[RouterRow]) -> str:
    return table(COLUMNS, [
        (row.door, f"{row.requests_per_s:,.0f}", f"{row.requests_per_cpu_s:,.0f}", f"{row.ttft_p50_ms:.1f} ms",
         f"{row.added_p50_ms:.1f} ms", f"{row.ttft_p99_ms:.1f} ms", f"{row.added_p99_ms:.1f} ms",
         f"{row.tokens_per_s:,.0f}", f"{row.tokens_per_cpu_s:,.0f}", f"{row.messages_per_token:.2f}")
        for row in rows
    ])
