"""`pd-relay bench sweep`: the same load on clusters that differ in one setting at a time, and which are worth it."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

import typer

from pd_engine.errors import InvalidArgument
from pd_ops.bench.identity import identity
from pd_ops.bench.sweep import SweepPlan, first_identity, keep_plan, parse_vary, read_rows, sweep, text
from pd_ops.bench.sweep_plot import plot
from pd_ops.cluster.interrupts import interruptible
from pd_ops.commands import options
from pd_ops.output import Interrupted

LOAD = "--kind short --requests 100 --rate 2"


def command(
    context: typer.Context,
    vary: Annotated[
        list[str], typer.Option(help="SECTION.KEY=V1,V2 of the settings, such as decode.workers=1,2; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of all results; what it holds is not measured again.")],
    load: Annotated[str, typer.Option(help="Flags of bench serve: load and targets.")] = LOAD,
    model: options.Model = None,
    config: options.Config = None,
    dtype: options.Dtype = None,
    limit_seconds: Annotated[float, typer.Option(min=1, help="After which a run is ended.")] = 300.0,
    page: Annotated[
        Path | None, typer.Option(help="Markdown file for the table with its identity; a plot goes beside it.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure one variable at a time: a cluster for the base and for each value, one after the other, all under the
    same load; then the front: fewest workers, most goodput, lowest p99. Ctrl-C keeps what it has; again goes on."""
    output = options.start(context, as_json)
    options.checked_file(page)
    plan = SweepPlan(
        load=_words(load), config=config, overrides=options.overrides(model=model, engine__dtype=dtype),
        variants=parse_vary(vary), limit_s=limit_seconds,
    )
    keep_plan(out, plan)
    interrupted = False
    try:
        with interruptible():
            asyncio.run(sweep(out, plan, output.note))
    except KeyboardInterrupt:
        interrupted = True
    rows = read_rows(out, plan)
    output.document({
        **identity(), "identity": first_identity(out, plan), "load": list(plan.load), "interrupted": interrupted,
        "rows": rows,
    })
    found = text(out, plan, rows)
    output.text(found)
    if page is not None:
        drawing = page.with_suffix(".svg")
        drawing.write_text(plot(rows), encoding="utf-8")
        picture = f"![the same as bars]({drawing.name})"
        page.write_text(f"# A sweep\n\n`pd-relay bench sweep`\n\n```\n{found}\n```\n\n{picture}\n", encoding="utf-8")
    if interrupted:
        raise Interrupted


def _words(load: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(load))
    except ValueError as error:
        raise InvalidArgument(f"--load must be flags of bench serve, got {load[:60]!r}: {error}") from None
