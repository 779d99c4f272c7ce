"""`pd-relay simulate published-day`: DeepSeek's published day of serving, beside a roofline and plain sums."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_ops.bench.identity import identity, identity_text
from pd_ops.commands import options
from pd_ops.tables import table


def command(
    context: typer.Context,
    efficiency: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the data sheet's rates.")] = 1.0,
    as_json: options.Json = False,
) -> None:
    """Compare DeepSeek's published day of serving V3 and R1 (H800, 32 devices a prefill worker and 144 a decode worker)
    with what the roofline of `simulate capacity --hardware` says."""
    output = options.start(context, as_json)
    from pd_ops.sizing.published_day import Day, compared

    about = identity()
    rows = compared(Day(), efficiency)
    output.document({**about, "efficiency": efficiency, "rows": rows})
    output.text(f"{identity_text(about)}\nby the data sheet of h800, at {efficiency:.0%} of its rates\n")
    output.text(table(("", "published", "computed", "ratio"), [
        (row["name"], f"{row['published']:,.4g}", f"{row['computed']:,.4g}", f"{row['ratio']:.2f}") for row in rows
    ]))
