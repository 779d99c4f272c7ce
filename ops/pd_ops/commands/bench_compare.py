"""`pd-relay bench compare`: in what two results differ, and only then which is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pd_engine.errors import shown
from pd_ops.bench.serve.compare import (
    Difference,
    Measure,
    differences,
    is_same_work,
    may_have_been_cached,
    measures,
)
from pd_ops.bench.serve.result import read_result
from pd_ops.commands import options
from pd_ops.tables import table


def command(
    context: typer.Context,
    left: Annotated[Path, typer.Argument(help="A result's folder, or its result.json.")],
    right: Annotated[Path, typer.Argument(help="The other one.")],
    as_json: options.Json = False,
) -> None:
    """Say in what two results of bench serve differ, then which is faster in what."""
    output = options.start(context, as_json)
    first, second = read_result(left), read_result(right)
    differing = differences(first, second)
    comparable = is_same_work(differing)
    rows = measures(first, second, is_same_work=comparable)
    cached = may_have_been_cached(first, second)
    output.document({
        "same_work": comparable, "may_have_been_cached": cached, "differences": [one.to_json() for one in differing],
        "measures": [row.to_json() for row in rows],
    })
    parts = [_differences(differing), _verdict(rows, comparable), _table(rows)]
    if cached:
        parts.insert(1, "both sent the same prompts (--prompt-salt), and one found more of them in caches: if it was "
                        "the later one at the same workers, it is faster by that alone")
    output.text("\n\n".join(parts))


def _differences(differing: list[Difference]) -> str:
    if not differing:
        return "the same identity, load and targets"
    return f"{len(differing)} differences:\n" + table(
        ("what", "left", "right"), [(one.name, shown(one.left), shown(one.right)) for one in differing]
    )


def _verdict(rows: list[Measure], comparable: bool) -> str:
    if not comparable:
        return "load or targets differ, so neither is faster: the figures below are of different work"
    goodput = rows[0]
    if goodput.better in ("left", "right"):
        ratio = "" if goodput.ratio is None else f" ({goodput.ratio:.2f} x)"
        return f"{goodput.better} has the higher goodput{ratio}; one run each, so a small ratio may be chance"
    return "the same goodput"


def _table(rows: list[Measure]) -> str:
    return table(("measure", "left", "right", "right/left", "better"), [
        (row.name, _number(row.left), _number(row.right), _number(row.ratio), row.better or "-") for row in rows
    ])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
