"""`pd-relay bench placement`: placements a second on one core, and the memory of the index of cached blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.placements import PlacementSpeed, measure_placements
from pd_ops.commands import options
from pd_ops.output import Document
from pd_ops.tables import mib, table

COLUMNS = (
    "workers", "blocks", "entries", "index", "prompt blocks", "placements/s", "look-up", "choose", "hash the prompt"
)


def command(
    context: typer.Context,
    workers: Annotated[int, typer.Option(help="Of both pools together.")] = 100,
    blocks: Annotated[int, typer.Option(min=1, help="Different cached blocks in the index.")] = 1_000_000,
    prompt_blocks: Annotated[
        list[int] | None, typer.Option(min=2, help="Full blocks of a prompt, half of them cached; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of 500 placements each; the median counts.")] = 9,
    as_json: options.Json = False,
) -> None:
    """Measure the router's choice of workers, by CPU time of one core; it needs no cluster and takes seconds."""
    output = options.start(context, as_json)
    about = identity()
    rows = [
        measure_placements(
            num_workers=workers, num_blocks=blocks, num_prompt_blocks=num_prompt_blocks, rounds=rounds
        )
        for num_prompt_blocks in prompt_blocks or [128]
    ]
    output.document({**about, "rounds": rounds, "rows": [row.to_json() for row in rows]})
    output.text(_text(about, rows))


def _text(about: Document, rows: list[PlacementSpeed]) -> str:
    return "\n".join([identity_text(about), table(COLUMNS, [
        (row.num_workers, row.num_blocks, row.num_entries, mib(row.index_bytes), row.num_prompt_blocks,
         f"{row.placements_per_s:,.0f}", f"{row.look_up_us:.1f} us", f"{row.choose_us:.1f} us",
         f"{row.hash_us:.0f} us")
        for row in rows
    ])])
