"""`pd-relay bench layers`: from single ops up to a client's tokens, and how much of each level is explained."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pd_engine.model.checkpoint import resolve_model
from pd_engine.settings import load_settings
from pd_ops.bench.engine_rows import Kind
from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.layers.levels import Level, Part, Row, explained, rows, rows_text
from pd_ops.bench.models import MADE_NAMES, write_model
from pd_ops.cluster.interrupts import interruptible
from pd_ops.commands import options
from pd_ops.output import Document, Interrupted, Output

if TYPE_CHECKING:
    from pd_ops.bench.layers.dissection import Dissected, Meter
    from pd_ops.bench.layers.work import Case

BATCHES, CONTEXT, PROMPTS = (1, 16), 512, (1024,)
CACHE_MIB = 256
PAGE_NOTE = (
    "Levels are timed apart, by CPU time but for rows that say wall clock; a rest below 0 is the noise of the "
    "measurement."
)


def command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=f"{', '.join(MADE_NAMES)}, demo or a path.")] = "demo",
    dtype: options.Dtype = None,
    ops: options.Ops = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of each process.")] = 1,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences to decode at once; repeatable. Default: 1, 16.")
    ] = None,
    context_tokens: Annotated[int, typer.Option(min=1, help="That each of them has in the cache.")] = CONTEXT,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt to read; repeatable. Default: 1024.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="In each of which every level has its turn.")] = 5,
    min_seconds: Annotated[float, typer.Option(min=0.0, help="CPU seconds of a turn at least.")] = 0.1,
    requests: Annotated[int, typer.Option(min=0, help="Of each case through workers; 0: none.")] = 3,
    page: Annotated[Path | None, typer.Option(help="Markdown file to write the table to, with its identity.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure GEMM, attention, router and experts, a layer, a forward, a decode step and a prompt, and tokens as a
    client gets them: each by itself, without drafts, and its share of the next level. Ctrl-C keeps what it has."""
    output = options.start(context, as_json)
    options.checked_file(page)
    from pd_ops.bench.layers.dissection import Meter  # imports torch
    from pd_ops.bench.layers.work import Case

    about = identity()
    cases = [Case(kind=Kind.DECODE, batch=each, tokens=context_tokens) for each in batch or BATCHES]
    cases += [Case(kind=Kind.PREFILL, batch=1, tokens=each) for each in prompt_tokens or PROMPTS]
    engine = options.overrides(dtype=dtype, ops=ops, threads=threads, cache_mib=CACHE_MIB)
    meter = Meter(rounds=rounds, min_s=min_seconds, by_cpu=threads == 1)
    found: list[Row] = []
    told: Document = {}
    interrupted = False
    try:
        with interruptible():
            _run(model, list(dict.fromkeys(cases)), engine, meter, requests=requests, found=found, told=told,
                 output=output)
    except KeyboardInterrupt:
        interrupted = True
    document = {
        **about, "model": model, **told, "threads": threads, "statistic": _statistic(meter, rounds),
        "interrupted": interrupted, "rows": [row.to_json() for row in found],
        "explained": [{"case": case, "level": level, "share": share}
                      for (case, level), share in explained(found).items()],
    }
    output.document(document)
    text = "\n".join([identity_text(document), _engine_text(document), document["statistic"], "", rows_text(found)])
    output.text(text)
    if page is not None:
        page.write_text(
            f"# From ops to tokens\n\n`pd-relay bench layers`\n\n{PAGE_NOTE}\n\n```\n{text}\n```\n", encoding="utf-8"
        )
    if interrupted:
        raise Interrupted


def _run(
    model: str, cases: list[Case], engine_settings: Document, meter: Meter, *, requests: int, found: list[Row],
    told: Document, output: Output,
) -> None:
    """Adds rows as they are known: of a case with requests once all of them have been sent."""
    from pd_engine.engine import Engine
    from pd_ops.bench.layers.client_level import client_times
    from pd_ops.bench.layers.dissection import dissect

    with tempfile.TemporaryDirectory(prefix="pd-relay-bench-") as directory:
        path = write_model(model, Path(directory) / model) if model in MADE_NAMES else resolve_model(model)
        settings = load_settings(None, {f"engine.{name}": value for name, value in engine_settings.items()}).engine
        engine = Engine.load(path, settings, max_speculate=0)
        told |= {"dtype": engine.dtype, "fingerprint": engine.fingerprint, "ops": engine.ops.name,
                 "num_parameters": engine.num_parameters, "num_layers": engine.config.num_hidden_layers}
        dissected: dict[Case, Dissected] = {}
        try:
            for case in cases:
                output.note(case.text)
                dissected[case] = dissect(engine, case, meter, settings.chunk_tokens)
            times = asyncio.run(client_times(path, cases, engine_settings, requests=requests, note=output.note)) \
                if requests else {}
        except KeyboardInterrupt:
            found += [row for case, one in dissected.items() for row in _rows(case, one, None)]
            raise
        found += [row for case, one in dissected.items() for row in _rows(case, one, times.get(case))]


def _rows(case: Case, dissected: Dissected, client_ms: float | None) -> list[Row]:
    """A step is a share of what a client waits by the wall clock, all else by the meter's."""
    parts, wholes_ms = list(dissected.parts), dict(dissected.wholes_ms)
    is_decode = case.kind is Kind.DECODE
    name = "decode step" if is_decode else "prefill"
    if client_ms is None:
        parts.append(Part(level=Level.STEP, name=name, ms=wholes_ms[Level.STEP]))
    else:
        wholes_ms[Level.CLIENT] = client_ms
        parts.append(Part(level=Level.STEP, name=f"{name}, wall clock", ms=dissected.step_wall_ms))
        parts.append(Part(level=Level.CLIENT, name="between tokens" if is_decode else "first token", ms=client_ms))
    return rows(case.text, parts, wholes_ms)


def _statistic(meter: Meter, rounds: int) -> str:
    clock = "CPU time" if meter.by_cpu else "the wall clock"
    return f"ms of {clock}, median of {rounds} rounds; what a client waits, and a step beside it, by the wall clock"


def _engine_text(document: Document) -> str:
    if "ops" not in document:
        return str(document["model"])
    return (
        f"{document['model']} {document['dtype']}, {document['num_parameters'] / 1e6:.1f} million parameters, "
        f"fingerprint {document['fingerprint']}, ops {document['ops']}, {document['threads']} thread(s), no drafts"
    )
