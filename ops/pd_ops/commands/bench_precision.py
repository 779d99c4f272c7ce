"""`pd-relay bench precision`: what bf16, FP8 latents and FP8 weights change in what a checkpoint says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pd_engine.errors import InvalidArgument
from pd_engine.fingerprint import weights_digest
from pd_engine.model.checkpoint import resolve_model
from pd_engine.model.config import ModelConfig
from pd_ops.bench.identity import identity, identity_text
from pd_ops.cluster.interrupts import interruptible
from pd_ops.commands import options
from pd_ops.output import Document, Interrupted
from pd_ops.tables import table

if TYPE_CHECKING:
    from pd_ops.bench.precision import PrecisionRow

COLUMNS = (
    "precision", "error", "beyond the weights'", "nats a token", "same choice", "in long answers",
    "first other token", "earliest", "none",
)
MAX_TOKENS = 4096


def command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="demo, or a checkpoint's folder.")] = "demo",
    texts: Annotated[int, typer.Option(min=1, max=1000, help="That float32 samples, and all read.")] = 8,
    text_tokens: Annotated[int, typer.Option(min=2, max=MAX_TOKENS, help="Of each.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Of each, that are answered.")] = 32,
    answer_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Of each greedy answer.")] = 256,
    as_json: options.Json = False,
) -> None:
    """Compare precisions of one checkpoint with float32: where greedy answers first differ, how many tokens of long
    answers would be the same, and the error of logits. Runs in one process; Ctrl-C keeps what it has."""
    output = options.start(context, as_json)
    path = resolve_model(model)
    limit = ModelConfig.load(path).max_position_embeddings
    if prompt_tokens >= text_tokens:
        raise InvalidArgument(f"--prompt-tokens must be less than --text-tokens ({text_tokens}), got {prompt_tokens}")
    if max(text_tokens, prompt_tokens + answer_tokens) > limit:
        raise InvalidArgument(f"texts, and prompts with their answers, must fit the model's context of {limit} tokens")
    about: Document = {
        **identity(), "model": str(path), "weights_hash": weights_digest(path), "texts": texts,
        "text_tokens": text_tokens, "prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens,
        "sampling": "texts: temperature 1, seeds from 0; answers: greedy", "prefill_form": "absorbed",
    }
    rows: list[PrecisionRow] = []
    interrupted = False
    try:
        with interruptible():
            from pd_ops.bench.precision import PrecisionPlan, measure_precision  # torch

            plan = PrecisionPlan(num_texts=texts, text_tokens=text_tokens, prompt_tokens=prompt_tokens,
                                 answer_tokens=answer_tokens)
            measure_precision(path, plan, note=output.note, add=rows.append)
    except KeyboardInterrupt:
        interrupted = True
    output.document({**about, "interrupted": interrupted, "rows": [row.to_json() for row in rows]})
    output.text(_text(about, rows))
    if interrupted:
        raise Interrupted


def _text(about: Document, rows: list[PrecisionRow]) -> str:
    length = about["answer_tokens"]
    return "\n".join([
        identity_text(about),
        f"{about['model']} (weights {about['weights_hash'][:12]}); {about['texts']} texts of {about['text_tokens']} "
        f"tokens, answers of {length} to their first {about['prompt_tokens']}; compared with "
        f"{rows[0].name if rows else 'fp32'}",
        "",
        table(COLUMNS, [
            (row.name, f"{row.error:.4f}", f"{row.error_of_precision:.4f}", f"{row.nats_a_token:.4f}",
             f"{row.same_choice:.1%}", f"{row.same_choice_in_answers:.1%}", f"{row.median_difference:g}",
             min(row.first_differences), sum(first == length for first in row.first_differences))
            for row in rows
        ]),
    ])
