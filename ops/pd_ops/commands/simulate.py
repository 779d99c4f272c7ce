"""`pd-relay simulate`: the group of commands that play a cluster on a virtual clock."""

from __future__ import annotations

import typer

from pd_ops.commands import simulate_capacity, simulate_faults, simulate_published_day

app = typer.Typer(help="Play a cluster on a virtual clock, without one.", no_args_is_help=True, rich_markup_mode=None)
app.command("faults")(simulate_faults.command)
app.command("capacity")(simulate_capacity.command)
app.command("published-day")(simulate_published_day.command)
