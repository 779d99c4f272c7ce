"""`pd-relay bench admission`: what the router makes of more requests than can be served in time, in simulated time."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.overload import PREFILL_TOKENS_PER_S, OverloadRow, overload
from pd_ops.commands import options
from pd_ops.tables import table

LOADS = (8.0, 10.0, 12.0, 14.0, 16.0, 24.0, 32.0)
COLUMNS = (
    "requests/s", "served", "refused at once", "in line", "in time/s", "TTFT p99", "most", "ITL p99", "most"
)


def command(
    context: typer.Context,
    load: Annotated[
        list[float] | None, typer.Option(min=0.1, help="Requests a second; repeatable; default: from easy to too many.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=30, help="Simulated; the first 20 are not counted.")] = 120,
    prefill_tokens_per_s: Annotated[
        float, typer.Option(min=100, help="Of each of the two simulated prefill workers.")
    ] = PREFILL_TOKENS_PER_S,
    targets: Annotated[bool, typer.Option(help="Refuse what would be late.")] = True,
    as_json: options.Json = False,
) -> None:
    """Measure admission, without a cluster: the router's classes with simulated workers whose speeds change, under
    rising load. Times are shares of their targets."""
    output = options.start(context, as_json)
    about = identity()
    rows = [
        overload(each, seconds=seconds, prefill_tokens_per_s=prefill_tokens_per_s, with_targets=targets)
        for each in load or LOADS
    ]
    output.document({**about, "seconds": seconds, "rows": [row.to_json() for row in rows]})
    output.text("\n".join([identity_text(about), _table(rows)]))


def _table(rows: list[OverloadRow]) -> str:
    return table(COLUMNS, [
        (f"{row.load_per_s:g}", f"{row.served_share:.0%}", f"{row.refused_at_once_share:.0%}",
         f"{row.refused_in_line_share:.0%}", f"{row.goodput_per_s:.1f}", f"{row.ttft_p99:.2f}", f"{row.ttft_most:.2f}",
         f"{row.itl_p99:.2f}", f"{row.itl_most:.2f}")
        for row in rows
    ])
