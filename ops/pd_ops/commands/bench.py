"""`pd-relay bench`: the group of measuring commands."""

from __future__ import annotations

import typer

from pd_ops.commands import (
    bench_admission,
    bench_compare,
    bench_engine,
    bench_layers,
    bench_placement,
    bench_precision,
    bench_router,
    bench_serve,
    bench_sweep,
    bench_transfer,
)

app = typer.Typer(help="Measure, beside others in the same run.", no_args_is_help=True, rich_markup_mode=None)
app.command("serve")(bench_serve.command)
app.command("compare")(bench_compare.command)
app.command("sweep")(bench_sweep.command)
app.command("engine")(bench_engine.command)
app.command("layers")(bench_layers.command)
app.command("transfer")(bench_transfer.command)
app.command("precision")(bench_precision.command)
app.command("placement")(bench_placement.command)
app.command("admission")(bench_admission.command)
app.command("router")(bench_router.command)
