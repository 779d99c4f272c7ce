"""`pd-relay bench transfer`: how fast transports are, beside bare copies, and what a handoff costs a client."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from pd_engine.errors import InvalidArgument
from pd_engine.model.checkpoint import resolve_model
from pd_engine.settings import TransferSettings
from pd_ops.bench.handoffs import HandoffRow, measure_handoffs
from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.models import TINY_NAME, write_model
from pd_ops.bench.moving_sizes import NUM_PIECES, REGION_BYTES
from pd_ops.cluster.interrupts import interruptible
from pd_ops.commands import options
from pd_ops.output import Document, Interrupted, Output
from pd_ops.tables import milliseconds, table

if TYPE_CHECKING:
    from pd_ops.bench.moving_cases import MovingRow

MIB = 2**20
TRANSPORTS = tuple(
    name for name in get_args(TransferSettings.model_fields["transport"].annotation) if name != "auto"
)
NO_EXTRA = ("shared_memory", "tcp")
PROMPT_TOKENS = (256, 2048)


def command(
    context: typer.Context,
    transport: Annotated[
        list[str] | None,
        typer.Option(help=f"{' or '.join(TRANSPORTS)}; repeatable. Default: {' and '.join(NO_EXTRA)}."),
    ] = None,
    model: Annotated[str, typer.Option(help="Of the handoffs: tiny, demo or a path.")] = TINY_NAME,
    dtype: Annotated[str, typer.Option(help="Of the handoffs: auto, bf16 or fp32.")] = "auto",
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt to hand over; repeatable. Default: 256, 2048.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Turns of each transport and bare copy; 0: leave them out.")] = 7,
    requests: Annotated[int, typer.Option(min=0, help="Handoffs of each kind; 0: leave them out.")] = 5,
    region_mib: Annotated[int, typer.Option(min=1, help="Size of the one region.")] = REGION_BYTES // MIB,
    pieces: Annotated[int, typer.Option(min=1, help="Number of scattered pieces of 18 KiB.")] = NUM_PIECES,
    as_json: options.Json = False,
) -> None:
    """Measure the transports beside a memcpy and bare sockets, and handoffs between real workers. Ctrl-C keeps what
    it has."""
    output = options.start(context, as_json)
    transports = list(dict.fromkeys(transport or NO_EXTRA))
    if unknown := [name for name in transports if name not in TRANSPORTS]:
        raise InvalidArgument(f"--transport must be {' or '.join(TRANSPORTS)}, got {unknown[0]!r}")
    about = identity()
    rows: list[MovingRow] = []
    handoffs: list[HandoffRow] = []
    interrupted = False
    try:
        with interruptible():
            if rounds:
                from pd_ops.bench.moving import measure_moving  # torch

                rows += asyncio.run(measure_moving(
                    transports, rounds=rounds, region_bytes=region_mib * MIB, num_pieces=pieces, note=output.note
                ))
            if requests:
                _measure_handoffs(
                    handoffs, transports, model, prompt_tokens or PROMPT_TOKENS, requests=requests, dtype=dtype,
                    output=output,
                )
    except KeyboardInterrupt:
        interrupted = True
    output.document({
        **about, "statistic": _STATISTIC, "rounds": rounds, "requests": requests, "model": model,
        "interrupted": interrupted, "rows": [row.to_json() for row in rows],
        "handoffs": [row.to_json() for row in handoffs],
    })
    output.text(_text(about, rows, handoffs))
    if interrupted:
        raise Interrupted


_STATISTIC = (
    "rows: best round of each side, by the wall clock for tcp (pieces in one fetch for each of its streams), by CPU "
    "time for shared memory and its copy; handoffs: medians, by the wall clock"
)


def _measure_handoffs(
    handoffs: list[HandoffRow], transports: list[str], model: str, prompt_tokens: list[int] | tuple[int, ...], *,
    requests: int, dtype: str, output: Output,
) -> None:
    """Adds rows as they are known."""
    with tempfile.TemporaryDirectory(prefix="pd-relay-bench-") as directory:
        path = write_model(TINY_NAME, Path(directory) / TINY_NAME) if model == TINY_NAME else resolve_model(model)
        for name in transports:
            asyncio.run(measure_handoffs(
                path, name, prompt_tokens, requests=requests, dtype=dtype, note=output.note, add=handoffs.append
            ))


def _text(about: Document, rows: list[MovingRow], handoffs: list[HandoffRow]) -> str:
    lines = [identity_text(about), _STATISTIC]
    if rows:
        lines += ["", table(("transport", "case", "checksums", "GiB/s", "bare GiB/s", "ratio"), [
            (row.transport, row.case, "yes" if row.checksums else "no", f"{row.gib_per_s:.2f}",
             f"{row.reference_gib_per_s:.2f}", f"{row.ratio:.2f}")
            for row in rows
        ])]
    if handoffs:
        lines += ["", table(("transport", "prompt", "hidden behind prefill", "token 1 later by", "steady ITL"), [
            (row.transport, row.prompt_tokens, f"{row.hidden_share:.1%}", milliseconds(row.token1_gap_ms),
             milliseconds(row.itl_ms))
            for row in handoffs
        ])]
    return "\n".join(lines)
